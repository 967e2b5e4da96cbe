{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - ..common

{%- if brine.parts.lifecycle and brine.parts_fit %}

{#- Brine itself checks the settings before they are put in place: a mistake in pillar changes nothing. #}
brine-lifecycle-settings:
{%- if brine.lifecycle.settings %}
  file.managed:
    - name: /etc/brine/lifecycle.toml
    - source: salt://{{ tplroot }}/files/settings.toml.jinja
    - template: jinja
    - context:
        part: lifecycle
        manual: brine-lifecycle.toml(5)
        settings: {{ brine.lifecycle.settings | json }}
    - user: root
    - group: root
    - mode: '0644'
    - check_cmd: /usr/sbin/brine-lifecycle --check --config
    - tmp_ext: .toml
{%- else %}
  file.absent:
    - name: /etc/brine/lifecycle.toml
{%- endif %}
    - require:
      - pkg: brine-packages

{#- The first folder of an owner starts the handler; one that runs reads its settings anew. #}
brine-lifecycle-path:
  brine_unit.managed:
    - name: brine-lifecycle.path
    - active: true
    - enabled: true
    - require:
      - pkg: brine-packages

{%- from tplroot ~ "/reload.jinja" import taken_over with context %}
{{ taken_over("brine-lifecycle-reloaded", "try-reload-or-restart", "brine-lifecycle.service", ["brine-lifecycle-settings"],
              [{"file": "brine-lifecycle-settings"}]) }}
{{ taken_over("brine-lifecycle-fence-restarted", "try-restart", "brine-lifecycle-fence.service", ["brine-lifecycle-settings"],
              [{"file": "brine-lifecycle-settings"}]) }}

brine-lifecycle-fence:
  brine_unit.managed:
    - name: brine-lifecycle-fence.service
    - active: {{ brine.lifecycle.fence | json }}
    - enabled: {{ brine.lifecycle.fence | json }}
    - require:
      - cmd: brine-lifecycle-fence-restarted
{%- endif %}
