{#- Undoes brine.watcher, also where pillar says that a node has no watcher. What users shut down stays off. #}
{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- from tplroot ~ "/map.jinja" import brine, watcher_drop_in, beacon_file with context %}
{%- if salt["service.available"]("brine-watcher.timer") %}

brine-clean-brine-watcher.timer:
  service.dead:
    - name: brine-watcher.timer
    - require_in:
      - pkg: brine-clean-watcher-package
{%- endif %}

brine-clean-watcher-package:
  pkg.removed:
    - name: {{ brine.watcher.package }}

{%- for file in ["/etc/brine/watcher.toml", watcher_drop_in] %}

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
{{ rmdir_if_ours(watcher_drop_in, "brine-clean-watcher-units-read") }}

{%- if salt["file.file_exists"](beacon_file) %}

brine-clean-beacon:
  file.absent:
    - name: {{ beacon_file | json }}

brine-clean-beacon-told:
  module.run:
    - event.fire:
      - data: {"func": "delete", "name": "brine"}
      - tag: manage_beacons
    - onchanges:
      - file: brine-clean-beacon
{%- endif %}
