{%- from "brine/map.jinja" import brine with context %}

include:
  - brine.repository
{%- if not brine.kvmd.enabled %}
  - brine.kvmd.clean
{%- endif %}

{#- All packages of Brine are of one version, so they are installed in one step, and unwanted ones go before. #}
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
      - module: brine-repository-read
{%- if not brine.kvmd.enabled %}
      - sls: brine.kvmd.clean
{%- endif %}
