{%- from "brine/map.jinja" import family_known, parts_fit with context %}

include:
{%- if family_known and not parts_fit %}
  - brine.parts_do_not_fit
{%- elif family_known %}
  - brine.common
  - brine.kvmd
  - brine.hotplug
  - brine.config
  - brine.confd
  - brine.instance
  - brine.lifecycle
  - brine.watcher
{%- else %}
  - brine.unknown_family
{%- endif %}
