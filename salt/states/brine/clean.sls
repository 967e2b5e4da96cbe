{#- Undoes the states of this folder. The system user and group stay, as the numbers of removed ones could be given to somebody else while files
    still belong to them. #}
{%- set tplroot = tpldir %}
{%- set sls_root = tplroot | replace("/", ".") %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
{%- if not brine.family_known %}
  - .unknown_family
{%- else %}
  - .watcher.clean
  - .lifecycle.clean
  - .instance.clean
  - .kvmd.clean
  - .confd.clean
  - .hotplug.clean

{#- All of it is undone, or nothing. What is said here replaces what brine.instance.clean says. #}
extend:
  brine-clean-no-instance-runs:
    brine_instance:
      - require_in:
        - sls: {{ sls_root }}.watcher.clean
        - sls: {{ sls_root }}.lifecycle.clean
        - sls: {{ sls_root }}.kvmd.clean
        - sls: {{ sls_root }}.confd.clean
        - sls: {{ sls_root }}.hotplug.clean

{#- The packages of parts are removed by now. A purge also takes what is left of them: settings, counters, records. #}
brine-clean-packages:
  pkg.purged:
    - pkgs:
      - brine-common
      - brine-config
{%- for part in brine.parts %}
      - brine-{{ part }}
{%- endfor %}
    - require:
      - sls: {{ sls_root }}.watcher.clean
      - sls: {{ sls_root }}.lifecycle.clean
      - sls: {{ sls_root }}.instance.clean
      - sls: {{ sls_root }}.kvmd.clean
      - sls: {{ sls_root }}.confd.clean
      - sls: {{ sls_root }}.hotplug.clean

{%- for file in [brine.repository.file, brine.repository.key_file] %}

brine-clean-{{ file }}:
  file.absent:
    - name: {{ file }}
    - require:
      - pkg: brine-clean-packages
{%- endfor %}
{%- endif %}
