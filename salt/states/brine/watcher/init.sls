{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - ..common
  - ..loaded

{%- if brine.parts.watcher and brine.parts_fit %}

{#- Brine itself checks the settings before they are put in place: a mistake in pillar changes nothing. #}
brine-watcher-settings:
{%- if brine.watcher.settings %}
  file.managed:
    - name: /etc/brine/watcher.toml
    - source: salt://{{ tplroot }}/files/settings.toml.jinja
    - template: jinja
    - context:
        part: watcher
        manual: brine-watcher.toml(5)
        settings: {{ brine.watcher.settings | json }}
    - user: root
    - group: root
    - mode: '0644'
    - check_cmd: /usr/bin/python3 -I -m brine.watcher.settings
    - tmp_ext: .toml
{%- else %}
  file.absent:
    - name: /etc/brine/watcher.toml
{%- endif %}
    - require:
      - pkg: brine-packages

{#- The timer can't read the settings: it is told where they differ from its own. #}
{%- set interval = brine.watcher.settings.get("interval", 300) %}
brine-watcher-drop-in:
{%- if interval is integer and interval != 300 %}
  file.managed:
    - name: {{ brine.watcher.drop_in }}
    - source: salt://{{ tplroot }}/files/watcher-timer.conf.jinja
    - template: jinja
    - context:
        interval_s: {{ interval | json }}
    - makedirs: true
    - user: root
    - group: root
    - mode: '0644'
{%- else %}
  file.absent:
    - name: {{ brine.watcher.drop_in }}
{%- endif %}
    - require:
      - file: brine-watcher-settings

brine-watcher-units-read:
  cmd.run:
    - name: systemctl daemon-reload
    - onchanges:
      - file: brine-watcher-drop-in

{%- from tplroot ~ "/reload.jinja" import noted, taken_over with context %}
{{ taken_over("brine-watcher-restarted", "try-restart", "brine-watcher.timer", ["brine-watcher-drop-in"], [{"cmd": "brine-watcher-units-read"}]) }}

brine-watcher-timer:
  brine_unit.managed:
    - name: brine-watcher.timer
    - active: {{ brine.watcher.timer | json }}
    - enabled: {{ brine.watcher.timer | json }}
    - require:
      - cmd: brine-watcher-restarted

{#- A minion without a master sends no events. #}
{%- if opts["file_client"] != "local" %}

brine-beacon:
{%- if brine.watcher.beacon %}
  file.managed:
    - name: {{ brine.watcher.beacon_file | json }}
    - contents: |
        beacons:
          brine: []
    - makedirs: true
    - user: root
    - group: root
    - mode: '0644'
{%- else %}
  file.absent:
    - name: {{ brine.watcher.beacon_file | json }}
{%- endif %}
    - require:
      - pkg: brine-packages
      - test: brine-states-loaded

{#- A minion that runs is told, as it reads the file when it starts. #}
{%- set due = "/run/brine-beacon.due" %}
{{ noted("brine-beacon-told", due, ["brine-beacon"]) }}

brine-beacon-told:
  module.run:
    - event.fire:
      - data: {{ {"func": "add" if brine.watcher.beacon else "delete", "name": "brine", "beacon_data": []} | json }}
      - tag: manage_beacons
{%- if not salt["file.file_exists"](due) %}
    - onchanges:
      - cmd: brine-beacon-told-due
{%- endif %}

brine-beacon-known:
  file.absent:
    - name: {{ due }}
    - require:
      - module: brine-beacon-told
{%- endif %}
{%- endif %}
