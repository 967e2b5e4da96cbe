{#- Undoes the states of this folder. Verdicts that others still read stay in the control directory, and the system user and group stay, as the
    numbers of removed ones could be given to somebody else while files still belong to them. #}
{%- from "brine/map.jinja" import brine, path_drop_in, service_drop_in with context %}

{#- The timer and the path unit first: either could start the service again. #}
{%- for unit in ["brine-kvmd-retry.timer", "brine-kvmd.path", "brine-kvmd.service"] %}

brine-clean-{{ unit }}:
  service.dead:
    - name: {{ unit }}
    - order: {{ loop.index }}
    - require_in:
      - pkg: brine-clean-packages
{%- endfor %}

brine-clean-packages:
  pkg.purged:
    - pkgs:
      - {{ brine.kvmd.package }}
      - {{ brine.common_package }}

{%- for file in ["/etc/brine/kvmd.toml", path_drop_in, service_drop_in, brine.repository.file, brine.repository.key_file] %}

brine-clean-{{ file }}:
  file.absent:
    - name: {{ file }}
    - require:
      - pkg: brine-clean-packages
    - onchanges_in:
      - cmd: brine-clean-units-read
{%- endfor %}

brine-clean-units-read:
  cmd.run:
    - name: systemctl daemon-reload
    - onchanges:
      - pkg: brine-clean-packages

{%- for folder in [path_drop_in, service_drop_in] | map("replace", "/salt.conf", "") %}

brine-clean-{{ folder }}:
  cmd.run:
    - name: rmdir --ignore-fail-on-non-empty {{ folder }}
    - onlyif: test -d {{ folder }} && test -z "$(ls -A {{ folder }})"
    - require:
      - cmd: brine-clean-units-read
{%- endfor %}
