{%- from "brine/map.jinja" import brine with context %}

include:
  - brine.repository

{#- All packages of Brine are of one version, so they are installed in one step. #}
{%- set packages = [brine.common_package] %}
{%- if brine.kvmd.enabled %}
{%- do packages.append(brine.kvmd.package) %}
{%- endif %}

brine-packages:
{%- if brine.version == "latest" %}
  pkg.latest:
    - pkgs: {{ packages | json }}
{%- else %}
  pkg.installed:
    - pkgs:
{%- for package in packages %}
      - {{ package }}{% if brine.version %}: '{{ brine.version }}'{% endif %}
{%- endfor %}
{%- endif %}
    - require:
      - file: brine-repository
