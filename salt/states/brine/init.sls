{%- set tplroot = tpldir %}
{%- from tplroot ~ "/map.jinja" import family_known, parts, parts_fit with context %}

include:
{%- if family_known and not parts_fit %}
  - .checked
{%- elif family_known %}
  - .common
{#- A file that has nothing for this node takes time all the same. #}
{%- for part in ["kvmd", "hotplug", "config", "confd", "instance", "lifecycle", "watcher"] if parts.get(part, true) %}
  - .{{ part }}
{%- endfor %}
{%- else %}
  - .unknown_family
{%- endif %}
