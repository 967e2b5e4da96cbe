{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- from tplroot ~ "/map.jinja" import brine, parts, scripts_dir with context %}

include:
  - ..common

{%- if parts.hotplug %}
{%- for name, script in brine.hotplug.scripts | dictsort if script is string and name is match("^[A-Za-z0-9_-]+$") %}

brine-hotplug-script-{{ name }}:
{%- if script %}
  file.managed:
    - name: {{ scripts_dir }}/{{ name }}
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
    - name: {{ scripts_dir }}/{{ name }}
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
