{%- set tplroot = tpldir %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
{%- if brine.family_known %}
  - .common
{%- if brine.network.bridges %}
  - .network
{%- endif %}
{#- A file that has nothing for this node takes time all the same. #}
{%- set parts = ["kvmd", "hotplug", "storage", "config", "confd", "instance", "lifecycle", "watcher", "moves", "master"] %}
{%- for part in parts if brine.parts_fit and brine.parts.get(part, brine.in_cluster) %}
  - .{{ part }}
{%- endfor %}
{%- else %}
  - .unknown_family
{%- endif %}
