{%- set tplroot = tpldir %}
{%- set sls_root = tplroot | replace("/", ".") %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - .loaded
{%- for part in brine.unwanted %}
  - .{{ part }}.clean
{%- endfor %}

{#- All other states require it: those of these files directly, and the rest by what they need themselves. Each instance is checked by its own states. #}
brine-pillar:
  brine_pillar.valid:
    - schema: salt://{{ tplroot }}/schema.json
    - parts: {{ brine.parts | json }}
    - require:
      - test: brine-states-loaded
    - require_in:
      - file: brine-repository-key
{%- for part in brine.parts %}
      - sls: {{ sls_root }}.{{ part }}.clean
{%- endfor %}

brine-repository-key:
{%- if brine.repository.key %}
  file.managed:
    - name: {{ brine.repository.key_file }}
    - contents_pillar: brine:repository:key
    - makedirs: true
    - user: root
    - group: root
    - mode: '0644'
{%- else %}
  file.absent:
    - name: {{ brine.repository.key_file }}
{%- endif %}

brine-repository:
{%- if brine.repository.line %}
  file.managed:
    - name: {{ brine.repository.file }}
    - contents_pillar: brine:repository:line
    - makedirs: true
    - user: root
    - group: root
    - mode: '0644'
{%- if grains["os_family"] == "Debian" %}
{#- With a line that apt can't read, it would refuse all of the node's repositories. #}
    - tmp_ext: .list
    - check_cmd: >-
        sh -c 'apt-get indextargets -o Dir::Etc::SourceParts=/dev/null -o Dir::Etc::SourceList="$0" >/dev/null'
{%- endif %}
{%- else %}
  file.absent:
    - name: {{ brine.repository.file }}
{%- endif %}
    - require:
      - file: brine-repository-key

{#- Salt itself reads the repositories once a run, which another state may have had before this file changed. #}
brine-repository-read:
  module.run:
    - pkg.refresh_db:
    - onchanges:
      - file: brine-repository-key
      - file: brine-repository

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
{%- if grains["os_family"] == "RedHat" and brine.other_packages %}
{#- Those that are installed may recommend them. #}
    - setopt:
      - excludepkgs={{ brine.other_packages | join(" ") }}
{%- endif %}
    - require:
      - brine_pillar: brine-pillar
      - file: brine-repository
      - module: brine-repository-read
{%- for part in brine.unwanted %}
      - sls: {{ sls_root }}.{{ part }}.clean
{%- endfor %}
{%- if grains["os_family"] == "Debian" and brine.other_packages %}

{#- apt also installs what brine-instance recommends, and Salt can't except a package from that. #}
brine-recommended-packages:
  pkg.removed:
    - pkgs: {{ brine.other_packages | json }}
    - onchanges:
      - pkg: brine-packages
{%- endif %}
