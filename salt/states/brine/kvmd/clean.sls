{#- Undoes brine.kvmd, also where pillar says that a node has no KVM daemon. Verdicts that others still read stay in the control directory. #}
{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

{#- The timer and the path unit first: either could start the service again. #}
{%- for unit in ["brine-kvmd-retry.timer", "brine-kvmd.path", "brine-kvmd.service"] if salt["service.available"](unit) %}

brine-clean-{{ unit }}:
  service.dead:
    - name: {{ unit }}
{%- if not loop.first %}
    - require:
      - service: brine-clean-{{ loop.previtem }}
{%- endif %}
    - require_in:
      - pkg: brine-clean-kvmd-package
{%- endfor %}

brine-clean-kvmd-package:
  pkg.removed:
    - name: brine-kvmd

{%- for file in ["/etc/brine/kvmd.toml", brine.kvmd.path_drop_in, brine.kvmd.service_drop_in] %}

brine-clean-{{ file }}:
  file.absent:
    - name: {{ file }}
    - require:
      - pkg: brine-clean-kvmd-package
    - onchanges_in:
      - cmd: brine-clean-units-read
{%- endfor %}

brine-clean-units-read:
  cmd.run:
    - name: systemctl daemon-reload
    - onchanges:
      - pkg: brine-clean-kvmd-package

{%- from tplroot ~ "/emptied.jinja" import rmdir_if_ours with context %}
{%- for drop_in in [brine.kvmd.path_drop_in, brine.kvmd.service_drop_in] %}
{{ rmdir_if_ours(drop_in, "brine-clean-units-read") }}
{%- endfor %}
