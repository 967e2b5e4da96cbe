{%- set tplroot = tpldir %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - .checked

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
    - user: root
    - group: root
    - mode: '0644'
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
