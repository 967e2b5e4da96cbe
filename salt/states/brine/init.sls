{%- from "brine/map.jinja" import brine with context %}

include:
  - brine.common
{%- if brine.kvmd.enabled %}
  - brine.kvmd
{%- endif %}
