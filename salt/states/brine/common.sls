{%- set tplroot = tpldir %}
{%- set sls_root = tplroot | replace("/", ".") %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - .checked
{%- if brine.parts_fit %}
  - .repository
{%- for part, enabled in brine.parts.items() if not enabled %}
  - .{{ part }}.clean
{%- endfor %}
{%- endif %}

{#- All packages of Brine are of one version, so they are installed in one step, and unwanted ones go before. A part that is added gets the version of
    the others: its newest would upgrade them. #}
{%- set present = salt["pkg.version"](*brine.packages) %}

brine-packages:
{%- if brine.version == "latest" %}
  pkg.latest:
    - pkgs: {{ brine.packages | json }}
{%- else %}
  pkg.installed:
    - pkgs:
{%- for package in brine.packages %}
{%- set version = brine.version or ("" if present[package] else present["brine-common"]) %}
      - {{ package }}{% if version %}: '{{ version }}'{% endif %}
{%- endfor %}
{%- endif %}
    - require:
      - brine_pillar: brine-pillar
{%- if brine.parts_fit %}
      - file: brine-repository
      - module: brine-repository-read
{%- for part, enabled in brine.parts.items() if not enabled %}
      - sls: {{ sls_root }}.{{ part }}.clean
{%- endfor %}
{%- endif %}
