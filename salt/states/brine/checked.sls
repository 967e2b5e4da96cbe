{%- set tplroot = tpldir %}
{%- from tplroot ~ "/map.jinja" import parts, sls_root with context %}

include:
  - .loaded

{#- All other states require it: those of these files directly, and the rest by what they need themselves. Each instance is checked by its own states. #}
brine-pillar:
  brine_pillar.valid:
    - schema: salt://{{ tplroot }}/schema.json
    - parts: {{ parts | json }}
    - require:
      - test: brine-states-loaded
    - require_in:
      - sls: {{ sls_root }}.repository
{%- for part in parts %}
      - sls: {{ sls_root }}.{{ part }}.clean
{%- endfor %}
