{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - ..common

{%- if brine.parts.storage and brine.parts_fit %}

{#- Folders that pillar does not name stay units: operators may have made them. #}
{%- for folder in brine.storage.directories | unique if folder is string %}

{{ ("brine-storage " ~ folder) | json }}:
  brine_storage.unit:
    - name: {{ folder | json }}
    - require:
      - pkg: brine-packages
{%- if brine.storage.default_unit %}
    - require_in:
      - brine_storage: brine-storage-default
{%- endif %}
{%- endfor %}

{%- if brine.storage.default_unit %}

brine-storage-default:
  brine_storage.default:
    - name: {{ brine.storage.default_unit | json }}
    - require:
      - pkg: brine-packages
{%- endif %}

{#- No instance waits for these: a disk that has died may be among them. #}
{%- for device, allocatable in brine.storage.allocatable | dictsort %}

{{ ("brine-storage-allocatable " ~ device) | json }}:
  brine_storage.allocatable:
    - name: {{ device | json }}
    - allocatable: {{ allocatable | json }}
    - require:
      - pkg: brine-packages
{%- endfor %}
{%- endif %}
