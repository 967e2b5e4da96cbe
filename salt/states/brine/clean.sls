{#- Undoes the states of this folder. The system user and group stay, as the numbers of removed ones could be given to other accounts while files
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
  - .moves.clean
  - .master.clean
  - .instance.clean
  - .kvmd.clean
  - .confd.clean
  - .hotplug.clean
  - .storage.clean

{#- All of it is undone, or nothing. This message replaces that of brine.instance.clean. #}
extend:
  brine-clean-no-instance-runs:
    brine_instance:
      - require_in:
        - sls: {{ sls_root }}.watcher.clean
        - sls: {{ sls_root }}.lifecycle.clean
        - sls: {{ sls_root }}.moves.clean
        - sls: {{ sls_root }}.master.clean
        - sls: {{ sls_root }}.kvmd.clean
        - sls: {{ sls_root }}.confd.clean
        - sls: {{ sls_root }}.hotplug.clean
        - sls: {{ sls_root }}.storage.clean

{#- dnf has no purge: what that takes on Debian is removed here, and before the last packages, so that these can remove their folders. #}
{%- if grains["os_family"] == "RedHat" %}
{%- set damaged = salt["file.find"]("/var/lib/brine/watcher.json.damaged*", maxdepth=0) %}
{%- for file in ["/var/lib/brine/config.versions", "/var/lib/brine/node.json", "/var/lib/brine/outbox", "/var/lib/brine/runtime", "/var/lib/brine/ssconf",
                 "/var/lib/brine/watcher.json", "/var/lib/brine/watcher-volumes.json", "/var/lib/brine/watcher.pause", "/var/log/brine/console"] + damaged %}

brine-clean-{{ file }}:
  file.absent:
    - name: {{ file }}
    - require:
      - pkg: brine-clean-instance-package
    - require_in:
      - pkg: brine-clean-packages
{%- endfor %}

brine-clean-/var/log/brine:
  cmd.run:
    - name: rmdir --ignore-fail-on-non-empty /var/log/brine
    - onchanges:
      - file: brine-clean-/var/log/brine/console
{%- endif %}

{#- VNC passwords and the like, which the external pillar has given. #}
brine-clean-config-files:
  brine_config.files_removed:
    - require:
      - test: brine-states-loaded
      - pkg: brine-clean-instance-package
    - require_in:
      - pkg: brine-clean-packages

{#- The packages of parts are removed by now. A purge also takes what is left of them: settings, counters, records. #}
brine-clean-packages:
  pkg.purged:
    - pkgs:
      - brine-common
      - brine-config
{%- for package in brine.part_packages %}
      - {{ package }}
{%- endfor %}
    - require:
      - sls: {{ sls_root }}.watcher.clean
      - sls: {{ sls_root }}.lifecycle.clean
      - sls: {{ sls_root }}.moves.clean
      - sls: {{ sls_root }}.master.clean
      - sls: {{ sls_root }}.instance.clean
      - sls: {{ sls_root }}.kvmd.clean
      - sls: {{ sls_root }}.confd.clean
      - sls: {{ sls_root }}.hotplug.clean
      - sls: {{ sls_root }}.storage.clean

{%- for file in [brine.repository.file, brine.repository.key_file] %}

brine-clean-{{ file }}:
  file.absent:
    - name: {{ file }}
    - require:
      - pkg: brine-clean-packages
{%- endfor %}
{%- endif %}
