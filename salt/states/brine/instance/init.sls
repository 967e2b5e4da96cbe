{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - .settings
{%- if brine.in_cluster %}
  - ..config
{%- endif %}

{%- if brine.parts.instance and brine.parts_fit %}

{#- One that has been here, and is another node's by now, must not run here too. One that is the cluster's is refused there. No name has a space, so no
    two of these states have the same. #}
{%- for name, node in brine.elsewhere.items() if name not in brine.of_cluster and salt["file.file_exists"]("/var/lib/brine/instances/" ~ name ~ ".json") %}

{{ ("brine-instance " ~ name) | json }}:
  brine_instance.elsewhere:
    - name: {{ name | json }}
    - node: {{ node | json }}
    - require:
      - pkg: brine-packages
{%- endfor %}

{#- A Brine that is there refuses what is wrong in a spec itself. #}
{%- set is_there = salt["file.file_exists"]("/usr/lib/systemd/system/brine-instance@.service") %}
{%- for name, spec in brine.specs.items() if name not in brine.of_cluster %}
{%- set id = "brine-instance " ~ name %}
{%- set goes = spec is mapping and spec.get("absent") is sameas true %}
{%- if not is_there %}

{{ (id ~ " pillar") | json }}:
  brine_pillar.valid:
    - schema: salt://{{ tplroot }}/schema.json
    - instance: {{ name | json }}
    - require:
      - brine_pillar: brine-pillar
    - require_in:
      - brine_instance: {{ id | json }}
{%- endif %}

{{ id | json }}:
{%- if goes %}
  brine_instance.absent:
    - name: {{ name | json }}
{%- else %}
  brine_instance.defined:
    - name: {{ name | json }}
    - spec: {{ spec | json }}
{%- endif %}
    - require:
      - file: brine-instance-settings

{%- set admin_state = spec.get("admin_state") if spec is mapping and not goes else none %}
{%- if admin_state in ["up", "down", "offline"] %}

{{ (id ~ (" running" if admin_state == "up" else " stopped")) | json }}:
  brine_instance.{{ "running" if admin_state == "up" else "stopped" }}:
    - name: {{ name | json }}
{%- if admin_state != "up" %}
    - parallel: true
{%- endif %}
    - require:
      - brine_instance: {{ id | json }}
{%- endif %}
{%- endfor %}
{%- endif %}
