{%- set tplroot = tpldir %}
{%- from tplroot ~ "/map.jinja" import brine, parts, parts_fit, sls_root with context %}

include:
  - .checked
{%- if parts_fit %}
  - .repository
{%- for part, enabled in parts.items() if not enabled %}
  - .{{ part }}.clean
{%- endfor %}
{%- endif %}

{#- All packages of Brine are of one version, so they are installed in one step, and unwanted ones go before. #}
{%- set packages = [brine.common_package, brine.config_package] %}
{%- for part, enabled in parts.items() if enabled %}
{%- do packages.append(brine[part].package) %}
{%- endfor %}

{#- A part that is added gets the version of the others: its newest would upgrade them. #}
{%- set present = salt["pkg.version"](*packages) %}

brine-packages:
{%- if brine.version == "latest" %}
  pkg.latest:
    - pkgs: {{ packages | json }}
{%- else %}
  pkg.installed:
    - pkgs:
{%- for package in packages %}
{%- set version = brine.version or ("" if present[package] else present[brine.common_package]) %}
      - {{ package }}{% if version %}: '{{ version }}'{% endif %}
{%- endfor %}
{%- endif %}
    - require:
      - brine_pillar: brine-pillar
{%- if parts_fit %}
      - file: brine-repository
      - module: brine-repository-read
{%- for part, enabled in parts.items() if not enabled %}
      - sls: {{ sls_root }}.{{ part }}.clean
{%- endfor %}
{%- endif %}
