{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - ..common

{%- if brine.kvmd.enabled %}

{#- The daemon itself checks the settings before they are put in place: a mistake in pillar changes nothing. #}
brine-kvmd-settings:
{%- if brine.kvmd.settings %}
  file.managed:
    - name: /etc/brine/kvmd.toml
    - source: salt://{{ tplroot }}/files/settings.toml.jinja
    - template: jinja
    - context:
        part: kvmd
        manual: brine-kvmd.toml(5)
        settings: {{ brine.kvmd.settings | json }}
    - user: root
    - group: root
    - mode: '0644'
    - check_cmd: /usr/sbin/brine-kvmd --check --config
    - tmp_ext: .toml
{%- else %}
  file.absent:
    - name: /etc/brine/kvmd.toml
{%- endif %}
    - require:
      - pkg: brine-packages

{#- The path unit can't read the settings: it is told where they differ from its own. #}
brine-kvmd-path-drop-in:
{%- if brine.kvmd.control_dir != "/run/brine/ctrl" or brine.kvmd.suffix != ".kvmd" %}
  file.managed:
    - name: {{ brine.kvmd.path_drop_in }}
    - source: salt://{{ tplroot }}/files/path.conf.jinja
    - template: jinja
    - context:
        control_dir: {{ brine.kvmd.control_dir | json }}
        suffix: {{ brine.kvmd.suffix | json }}
    - makedirs: true
    - user: root
    - group: root
    - mode: '0644'
{%- else %}
  file.absent:
    - name: {{ brine.kvmd.path_drop_in }}
{%- endif %}
    - require:
      - file: brine-kvmd-settings

brine-kvmd-service-drop-in:
{%- if brine.kvmd.root_only or not brine.kvmd.control_dir.startswith("/run/") %}
  file.managed:
    - name: {{ brine.kvmd.service_drop_in }}
    - source: salt://{{ tplroot }}/files/service.conf.jinja
    - template: jinja
    - context:
        control_dir: {{ brine.kvmd.control_dir | json }}
        root_only: {{ brine.kvmd.root_only | json }}
    - makedirs: true
    - user: root
    - group: root
    - mode: '0644'
{%- else %}
  file.absent:
    - name: {{ brine.kvmd.service_drop_in }}
{%- endif %}
    - require:
      - file: brine-kvmd-settings

brine-kvmd-units-read:
  cmd.run:
    - name: systemctl daemon-reload
    - onchanges:
      - file: brine-kvmd-path-drop-in
      - file: brine-kvmd-service-drop-in

{#- Where the daemon runs, new drop-ins are a restart and new settings a reload; neither loses what it has seen. A reload
    runs in the sandbox of the new drop-ins, so it comes second. #}
{%- from tplroot ~ "/reload.jinja" import taken_over with context %}
{{ taken_over("brine-kvmd-restarted", "try-restart", "brine-kvmd.service", ["brine-kvmd-service-drop-in"], [{"cmd": "brine-kvmd-units-read"}]) }}
{{ taken_over("brine-kvmd-path-restarted", "try-restart", "brine-kvmd.path", ["brine-kvmd-path-drop-in"], [{"cmd": "brine-kvmd-units-read"}]) }}
{{ taken_over("brine-kvmd-reloaded", "try-reload-or-restart", "brine-kvmd.service", ["brine-kvmd-settings"],
              [{"file": "brine-kvmd-settings"}, {"cmd": "brine-kvmd-restarted"}]) }}

{#- A directory that is root's alone must be there when the daemon starts, and is with its first socket. #}
{%- if brine.kvmd.on_demand or brine.kvmd.root_only %}

brine-kvmd-not-always:
  brine_unit.managed:
    - name: brine-kvmd.service
    - enabled: false
    - require:
      - file: brine-kvmd-settings

brine-kvmd-running:
  brine_unit.managed:
    - name: brine-kvmd.path
    - active: true
    - enabled: true
    - require:
      - cmd: brine-kvmd-reloaded
      - cmd: brine-kvmd-restarted
      - cmd: brine-kvmd-path-restarted
{%- else %}

brine-kvmd-not-on-demand:
  brine_unit.managed:
    - name: brine-kvmd.path
    - active: false
    - enabled: false
    - require:
      - file: brine-kvmd-settings

brine-kvmd-no-retry:
  brine_unit.managed:
    - name: brine-kvmd-retry.timer
    - active: false
    - require:
      - brine_unit: brine-kvmd-not-on-demand

brine-kvmd-running:
  brine_unit.managed:
    - name: brine-kvmd.service
    - active: true
    - enabled: true
    - require:
      - brine_unit: brine-kvmd-no-retry
      - cmd: brine-kvmd-reloaded
      - cmd: brine-kvmd-restarted
{%- endif %}
{%- endif %}
