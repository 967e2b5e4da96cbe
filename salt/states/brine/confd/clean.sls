{#- Undoes brine.confd, also where pillar says that a node has no configuration daemon. Keys that pillar does not have may be the only copies: they
    stay. #}
{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}
{%- set keys = [brine.confd.key_file, brine.confd.previous_key_file] if brine.confd.key else [] %}
{%- if salt["service.available"]("brine-confd.service") %}

brine-clean-brine-confd.service:
  service.dead:
    - name: brine-confd.service
    - require_in:
      - pkg: brine-clean-confd-package
{%- for file in keys %}
      - file: {{ ("brine-clean-" ~ file) | json }}
{%- endfor %}
{%- endif %}

brine-clean-confd-package:
  pkg.removed:
    - name: brine-confd

{#- The keys first, or the package could not remove their folder. #}
{%- for file in keys %}

brine-clean-{{ file }}:
  file.absent:
    - name: {{ file | json }}
    - require_in:
      - pkg: brine-clean-confd-package
{%- endfor %}

{%- for file in ["/etc/brine/confd.toml", brine.confd.drop_in] %}

brine-clean-{{ file }}:
  file.absent:
    - name: {{ file }}
    - require:
      - pkg: brine-clean-confd-package
    - onchanges_in:
      - cmd: brine-clean-confd-units-read
{%- endfor %}

brine-clean-confd-units-read:
  cmd.run:
    - name: systemctl daemon-reload
    - onchanges:
      - pkg: brine-clean-confd-package

{%- from tplroot ~ "/emptied.jinja" import rmdir_if_ours with context %}
{{ rmdir_if_ours(brine.confd.drop_in, "brine-clean-confd-units-read") }}
