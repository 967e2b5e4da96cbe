{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - ..common

{#- Bridges that pillar no longer names stay: guests may be on them. #}
{%- for name, bridge in brine.network.bridges | dictsort if bridge is mapping %}

{{ ("brine-network " ~ name) | json }}:
  brine_network.bridge:
    - name: {{ name | json }}
{%- for key, value in bridge | dictsort if value is not none %}
    - {{ key | json }}: {{ value | json }}
{%- endfor %}
    - require:
      - brine_pillar: brine-pillar
{%- endfor %}
