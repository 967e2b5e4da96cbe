{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - ..common

{%- if brine.parts.hotplug %}
{%- for name, script in brine.hotplug.scripts | dictsort if script is string and name is match("^[A-Za-z0-9_-]+$") %}

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

{%- if brine.hotplug.gc %}

brine-hotplug-gc:
  service.running:
    - name: brine-tap-gc.timer
    - enable: true
    - require:
      - pkg: brine-packages
{%- else %}

brine-hotplug-no-gc:
  service.dead:
    - name: brine-tap-gc.timer
    - enable: false
    - require:
      - pkg: brine-packages
{%- endif %}
{%- endif %}
