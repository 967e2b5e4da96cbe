{#- Undoes brine.watcher, also where pillar says that a node has no watcher. Instances that users shut down stay off. #}
{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}
{%- if salt["service.available"]("brine-watcher.timer") %}

brine-clean-brine-watcher.timer:
  service.dead:
    - name: brine-watcher.timer
    - require_in:
      - pkg: brine-clean-watcher-package
{%- endif %}

brine-clean-watcher-package:
  pkg.removed:
    - name: brine-watcher

{%- for file in ["/etc/brine/watcher.toml", brine.watcher.drop_in] %}

brine-clean-{{ file }}:
  file.absent:
    - name: {{ file }}
    - require:
      - pkg: brine-clean-watcher-package
    - onchanges_in:
      - cmd: brine-clean-watcher-units-read
{%- endfor %}

brine-clean-watcher-units-read:
  cmd.run:
    - name: systemctl daemon-reload
    - onchanges:
      - pkg: brine-clean-watcher-package

{%- from tplroot ~ "/emptied.jinja" import rmdir_if_ours with context %}
{{ rmdir_if_ours(brine.watcher.drop_in, "brine-clean-watcher-units-read") }}

{%- if salt["file.file_exists"](brine.watcher.beacon_file) %}

brine-clean-beacon:
  file.absent:
    - name: {{ brine.watcher.beacon_file | json }}

brine-clean-beacon-told:
  module.run:
    - event.fire:
      - data: {"func": "delete", "name": "brine"}
      - tag: manage_beacons
    - onchanges:
      - file: brine-clean-beacon
{%- endif %}
