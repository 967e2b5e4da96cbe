{#- Undoes the states of this folder. The system user and group stay, as the numbers of removed ones could be given to somebody else while files
    still belong to them. #}
{%- from "brine/map.jinja" import brine, parts, family_known with context %}

include:
{%- if not family_known %}
  - brine.unknown_family
{%- else %}
  - brine.watcher.clean
  - brine.lifecycle.clean
  - brine.instance.clean
  - brine.kvmd.clean
  - brine.confd.clean
  - brine.hotplug.clean

{#- All of it is undone, or nothing. What is said here replaces what brine.instance.clean says. #}
extend:
  brine-clean-no-instance-runs:
    brine_instance:
      - require_in:
        - sls: brine.watcher.clean
        - sls: brine.lifecycle.clean
        - sls: brine.kvmd.clean
        - sls: brine.confd.clean
        - sls: brine.hotplug.clean

{#- The packages of parts are removed by now. A purge also takes what is left of them: settings, counters, records. #}
{%- set packages = [brine.common_package, brine.config_package] %}
{%- for part in parts %}
{%- do packages.append(brine[part].package) %}
{%- endfor %}

brine-clean-packages:
  pkg.purged:
    - pkgs: {{ packages | json }}
    - require:
      - sls: brine.watcher.clean
      - sls: brine.lifecycle.clean
      - sls: brine.instance.clean
      - sls: brine.kvmd.clean
      - sls: brine.confd.clean
      - sls: brine.hotplug.clean

{%- for file in [brine.repository.file, brine.repository.key_file] %}

brine-clean-{{ file }}:
  file.absent:
    - name: {{ file }}
    - require:
      - pkg: brine-clean-packages
{%- endfor %}
{%- endif %}
