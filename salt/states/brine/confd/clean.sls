{#- Undoes brine.confd, also where pillar says that a node has no configuration daemon. Keys that pillar does not have may be the only copies: they
    stay. #}
{%- from "brine/map.jinja" import brine, confd_drop_in, key_file, previous_key_file with context %}

brine-clean-brine-confd.service:
  service.dead:
    - name: brine-confd.service
    - onlyif: systemctl cat brine-confd.service
    - require_in:
      - pkg: brine-clean-confd-package

brine-clean-confd-package:
  pkg.purged:
    - name: {{ brine.confd.package }}

{#- The keys first, or the package could not remove their folder. #}
{%- for file in [key_file, previous_key_file] if brine.confd.key %}

brine-clean-{{ file }}:
  file.absent:
    - name: {{ file | json }}
    - require:
      - service: brine-clean-brine-confd.service
    - require_in:
      - pkg: brine-clean-confd-package
{%- endfor %}

{%- for file in ["/etc/brine/confd.toml", confd_drop_in] %}

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

{%- set folder = confd_drop_in | replace("/salt.conf", "") %}

brine-clean-{{ folder }}:
  cmd.run:
    - name: rmdir --ignore-fail-on-non-empty {{ folder }}
    - onlyif: test -d {{ folder }} && test -z "$(ls -A {{ folder }})"
    - require:
      - cmd: brine-clean-confd-units-read
