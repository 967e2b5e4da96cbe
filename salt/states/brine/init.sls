{%- from "brine/map.jinja" import family_known with context %}

include:
{%- if family_known %}
  - brine.common
  - brine.kvmd
  - brine.hotplug
  - brine.config
  - brine.confd
{%- else %}
  - brine.unknown_family
{%- endif %}
