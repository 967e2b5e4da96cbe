{%- set tplroot = tpldir %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
{%- if brine.family_known and not brine.parts_fit %}
  - .checked
{%- elif brine.family_known %}
  - .common
{#- A file that has nothing for this node takes time all the same. #}
{%- for part in ["kvmd", "hotplug", "config", "confd", "instance", "lifecycle", "watcher"] if brine.parts.get(part, true) %}
  - .{{ part }}
{%- endfor %}
{%- else %}
  - .unknown_family
{%- endif %}
