{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- from tplroot ~ "/map.jinja" import brine, parts, scripts_dir with context %}

include:
  - ..common

{%- if parts.hotplug %}
{%- for name, script in brine.hotplug.scripts | dictsort %}

brine-hotplug-script-{{ name }}:
{%- if not name is match("^[A-Za-z0-9_-]+$") %}
  test.fail_without_changes:
    - name: {{ ("a script in " ~ scripts_dir ~ " would not be run with the name " ~ name ~ ": letters, digits, - and _ only") | json }}
{%- elif script %}
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
