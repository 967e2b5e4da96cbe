{#- Undoes brine.instance, also where pillar says that a node runs no instances. While one runs nothing is undone. The specs stay: their
    UUIDs and MAC addresses may be nowhere else. #}
{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set sls_root = tplroot | replace("/", ".") %}

{#- Its package would take that one with it. #}
include:
  - ..loaded
  - ..watcher.clean

brine-clean-no-instance-runs:
  brine_instance.none_running:
    - require:
      - test: brine-states-loaded
    - require_in:
      - sls: {{ sls_root }}.watcher.clean

{#- Of a unit that is not there test mode would say that it might be by then. #}
{%- if salt["service.available"]("brine-instances.target") %}

brine-clean-brine-instances.target:
  service.dead:
    - name: brine-instances.target
    - require:
      - brine_instance: brine-clean-no-instance-runs
    - require_in:
      - pkg: brine-clean-instance-package
{%- endif %}

brine-clean-instance-package:
  pkg.removed:
    - name: brine-instance
    - require:
      - pkg: brine-clean-watcher-package
      - brine_instance: brine-clean-no-instance-runs

brine-clean-/etc/brine/instance.toml:
  file.absent:
    - name: /etc/brine/instance.toml
    - require:
      - pkg: brine-clean-instance-package
