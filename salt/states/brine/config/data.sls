{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - ..common
  - ..loaded

{%- if brine.config.source and brine.config.apply %}

{#- The name says it all: in test mode Salt replaces the comment. #}
brine-config-applied-and-copied:
  test.fail_without_changes:
    - name: >-
        pillar brine:config has both apply and source: a node either makes the configuration or gets a copy of it; remove one of the two
    - comment: the configuration was not changed
    - require_in:
      - brine_config: brine-ssconf
{%- elif brine.other_master %}

brine-config-made-elsewhere:
  test.fail_without_changes:
    - name: {{ ("pillar brine:config:apply is true, but brine:cluster:master is " ~ brine.other_master ~
        ", and only the master's host makes the configuration; give brine:config:apply and the cluster's sections to that node alone") | json }}
    - comment: the configuration was not changed
    - require_in:
      - brine_config: brine-ssconf
{%- elif brine.config.source %}

{#- A copy of the file that another node made. Brine itself checks it before it is put in place. #}
brine-config-copied:
  file.managed:
    - name: /var/lib/brine/config.data
    - source: {{ brine.config.source | json }}
    - skip_verify: true
    - show_changes: false
    - user: root
    - group: brine
    - mode: '0640'
    - check_cmd: /usr/bin/brine config check-copy
    - require:
      - pkg: brine-packages
    - require_in:
      - brine_config: brine-ssconf
{%- elif brine.config.apply %}

brine-config-applied:
  brine_config.applied:
    - pillar: brine
    - prune: {{ brine.config.prune | json }}
    - require:
      - pkg: brine-packages
      - test: brine-states-loaded
    - require_in:
      - brine_config: brine-ssconf

{#- Pillar of the other nodes may have been rendered while there was no brine here. #}
brine-config-announced:
  brine_config.announced:
    - onchanges:
      - pkg: brine-packages
    - require:
      - brine_config: brine-config-applied
{%- elif brine.is_distributed %}

brine-config-copied:
  brine_config.copied:
    - name: /var/lib/brine/config.data
    - require:
      - pkg: brine-packages
      - test: brine-states-loaded
{%- endif %}

{#- What every node should know: made from the configuration where there is one, else copied. #}
brine-ssconf:
{%- if brine.is_distributed and not (brine.config.source or brine.config.apply) %}
  brine_config.ssconf_copied:
{%- else %}
  brine_config.ssconf_exported:
{%- endif %}
    - name: /var/lib/brine/ssconf
    - require:
      - pkg: brine-packages
      - test: brine-states-loaded

{%- if brine.config.ssconf_source and not (brine.is_distributed or brine.config.source or brine.config.apply) %}

brine-ssconf-copied:
  file.recurse:
    - name: /var/lib/brine/ssconf
    - source: {{ brine.config.ssconf_source | json }}
    - user: root
    - group: root
    - file_mode: '0644'
    - dir_mode: '0755'
    - require:
      - brine_config: brine-ssconf
{%- endif %}

{#- VNC passwords and the like. The writer's host is where they come from. #}
{%- if brine.is_distributed and not brine.config.apply %}

brine-config-files:
  brine_config.files_copied:
    - require:
      - pkg: brine-packages
      - test: brine-states-loaded
{%- endif %}
