{%- from "brine/map.jinja" import brine with context %}

{%- if brine.repository.key %}

brine-repository-key:
  file.managed:
    - name: {{ brine.repository.key_file }}
    - contents_pillar: brine:repository:key
    - makedirs: true
    - user: root
    - group: root
    - mode: '0644'
    - require_in:
      - file: brine-repository
{%- endif %}

brine-repository:
{%- if brine.repository.line %}
  file.managed:
    - name: {{ brine.repository.file }}
    - contents_pillar: brine:repository:line
    - user: root
    - group: root
    - mode: '0644'
{%- else %}
  file.absent:
    - name: {{ brine.repository.file }}
{%- endif %}
