{%- set tplroot = tpldir %}
{%- from tplroot ~ "/map.jinja" import family_known, parts_fit with context %}

include:
{%- if family_known and not parts_fit %}
  - .checked
{%- elif family_known %}
  - .common
  - .kvmd
  - .hotplug
  - .config
  - .confd
  - .instance
  - .lifecycle
  - .watcher
{%- else %}
  - .unknown_family
{%- endif %}
