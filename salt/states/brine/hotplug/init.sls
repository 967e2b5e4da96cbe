{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - ..common

{%- if brine.parts.hotplug %}
{%- for name, script in brine.hotplug.scripts | dictsort if script is string and name is match("[A-Za-z0-9_-]+\\Z") %}

brine-hotplug-script-{{ name }}:
{%- if script %}
  file.managed:
    - name: {{ brine.hotplug.scripts_dir }}/{{ name }}
{%- if script.startswith("salt://") %}
    - source: {{ script | json }}
{%- else %}
    - contents_pillar: brine:hotplug:scripts:{{ name }}
{%- endif %}
    - user: root
    - group: root
    - mode: '0755'
{%- else %}
  file.absent:
    - name: {{ brine.hotplug.scripts_dir }}/{{ name }}
{%- endif %}
    - require:
      - pkg: brine-packages
{%- endfor %}

brine-hotplug-gc:
  brine_unit.managed:
    - name: brine-tap-gc.timer
    - active: {{ brine.hotplug.gc | json }}
    - enabled: {{ brine.hotplug.gc | json }}
    - require:
      - pkg: brine-packages
{%- endif %}
