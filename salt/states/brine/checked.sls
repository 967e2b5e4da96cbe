{%- set tplroot = tpldir %}
{%- set sls_root = tplroot | replace("/", ".") %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - .loaded

{#- All other states require it: those of these files directly, and the rest by what they need themselves. Each instance is checked by its own states. #}
brine-pillar:
  brine_pillar.valid:
    - schema: salt://{{ tplroot }}/schema.json
    - parts: {{ brine.parts | json }}
    - require:
      - test: brine-states-loaded
    - require_in:
      - sls: {{ sls_root }}.repository
{%- for part in brine.parts %}
      - sls: {{ sls_root }}.{{ part }}.clean
{%- endfor %}
