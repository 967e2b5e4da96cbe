{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - ..common
  - ..config.data

{#- One that pillar says nothing of is upgraded with the others, and else left alone where it is to run. #}
{%- if brine.parts.confd and (brine.confd.enabled or brine.confd.key) %}

{#- A node whose pillar has no key keeps what it has: the files belong to others. Brine itself checks a key before it is put in place. #}
{%- if brine.confd.key %}

brine-confd-key:
  file.managed:
    - name: {{ brine.confd.key_file | json }}
    - contents_pillar: brine:confd:key
    - show_changes: false
    - user: root
    - group: root
    - mode: '0600'
    - check_cmd: /usr/bin/brine confd check-key
    - require:
      - pkg: brine-packages
    - require_in:
      - file: brine-confd-settings

brine-confd-previous-key:
{%- if brine.confd.previous_key %}
  file.managed:
    - name: {{ brine.confd.previous_key_file | json }}
    - contents_pillar: brine:confd:previous_key
    - show_changes: false
    - user: root
    - group: root
    - mode: '0600'
    - check_cmd: /usr/bin/brine confd check-key
{%- else %}
  file.absent:
    - name: {{ brine.confd.previous_key_file | json }}
{%- endif %}
    - require:
      - pkg: brine-packages
    - require_in:
      - file: brine-confd-settings
{%- endif %}

{#- The daemon itself checks the settings before they are put in place: a mistake in pillar changes nothing. #}
brine-confd-settings:
{%- if brine.confd.settings %}
  file.managed:
    - name: /etc/brine/confd.toml
    - source: salt://{{ tplroot }}/files/settings.toml.jinja
    - template: jinja
    - context:
        part: confd
        manual: brine-confd.toml(5)
        settings: {{ brine.confd.settings | json }}
    - user: root
    - group: root
    - mode: '0644'
    - check_cmd: /usr/sbin/brine-confd --check --config
    - tmp_ext: .toml
{%- else %}
  file.absent:
    - name: /etc/brine/confd.toml
{%- endif %}
    - require:
      - pkg: brine-packages

{#- The unit can't read the settings: it is told where they differ from its own. #}
brine-confd-drop-in:
{%- if brine.confd.root_only or brine.confd.key_file != "/etc/brine/hmac.key" or brine.confd.previous_key_file != "/etc/brine/hmac.key.previous" %}
  file.managed:
    - name: {{ brine.confd.drop_in }}
    - source: salt://{{ tplroot }}/files/confd-service.conf.jinja
    - template: jinja
    - context:
        config_file: {{ brine.confd.settings.get("config_file", "/var/lib/brine/config.data") | json }}
        key_file: {{ brine.confd.key_file | json }}
        previous_key_file: {{ brine.confd.previous_key_file | json }}
        root_only: {{ brine.confd.root_only | json }}
    - makedirs: true
    - user: root
    - group: root
    - mode: '0644'
{%- else %}
  file.absent:
    - name: {{ brine.confd.drop_in }}
{%- endif %}
    - require:
      - file: brine-confd-settings

brine-confd-units-read:
  cmd.run:
    - name: systemctl daemon-reload
    - onchanges:
      - file: brine-confd-drop-in

{#- Where the daemon runs, a new drop-in is a restart, and new keys and settings are a reload, which no request waits for. A reload runs in the
    sandbox of the new drop-in, so it comes second. #}
{%- from tplroot ~ "/reload.jinja" import taken_over with context %}
{%- set keys = ["brine-confd-key", "brine-confd-previous-key"] if brine.confd.key else [] %}
{{ taken_over("brine-confd-restarted", "try-restart", "brine-confd.service", ["brine-confd-drop-in"], [{"cmd": "brine-confd-units-read"}]) }}
{{ taken_over("brine-confd-reloaded", "try-reload-or-restart", "brine-confd.service", keys + ["brine-confd-settings"],
              [{"file": "brine-confd-settings"}, {"cmd": "brine-confd-restarted"}]) }}

{%- if brine.confd.daemon and not brine.confd.key and not salt["file.file_exists"](brine.confd.key_file) %}

{#- It is looked for again in its turn: other states may have brought it by then. The name says it all: in test mode Salt replaces the comment. #}
brine-confd-has-no-key:
  test.fail_without_changes:
    - name: {{ ("brine-confd is enabled and has no key: put the cluster's into pillar, brine:confd:key, or into the node's " ~ brine.confd.key_file
                ~ "; \"openssl rand -hex 32\" makes the key of a new cluster") | json }}
    - comment: the daemon is not started
    - unless:
      - fun: file.file_exists
        path: {{ brine.confd.key_file | json }}
    - require:
      - pkg: brine-packages
    - require_in:
      - brine_unit: brine-confd-running
{%- endif %}

brine-confd-running:
  brine_unit.managed:
    - name: brine-confd.service
    - active: {{ brine.confd.daemon | json }}
    - enabled: {{ brine.confd.daemon | json }}
    - require:
      - cmd: brine-confd-reloaded
      - cmd: brine-confd-restarted
{%- elif brine.parts.confd and not brine.confd.daemon %}

{#- It would go on to answer with a configuration that the node no longer has. #}
brine-confd-running:
  brine_unit.managed:
    - name: brine-confd.service
    - active: false
    - enabled: false
    - require:
      - pkg: brine-packages
{%- endif %}
