{#- Undoes brine.kvmd, also where pillar says that a node has no KVM daemon. Verdicts that others still read stay in the control directory. #}
{%- from "brine/map.jinja" import brine, path_drop_in, service_drop_in with context %}

{#- The timer and the path unit first: either could start the service again. #}
{%- for unit in ["brine-kvmd-retry.timer", "brine-kvmd.path", "brine-kvmd.service"] %}

brine-clean-{{ unit }}:
  service.dead:
    - name: {{ unit }}
    - onlyif: systemctl cat {{ unit }}
{%- if not loop.first %}
    - require:
      - service: brine-clean-{{ loop.previtem }}
{%- endif %}
    - require_in:
      - pkg: brine-clean-kvmd-package
{%- endfor %}

brine-clean-kvmd-package:
  pkg.purged:
    - name: {{ brine.kvmd.package }}

{%- for file in ["/etc/brine/kvmd.toml", path_drop_in, service_drop_in] %}

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

{%- for folder in [path_drop_in, service_drop_in] | map("replace", "/salt.conf", "") %}

brine-clean-{{ folder }}:
  cmd.run:
    - name: rmdir --ignore-fail-on-non-empty {{ folder }}
    - onlyif: test -d {{ folder }} && test -z "$(ls -A {{ folder }})"
    - require:
      - cmd: brine-clean-units-read
{%- endfor %}
