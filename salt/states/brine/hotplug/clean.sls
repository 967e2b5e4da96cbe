{#- Undoes brine.hotplug, also where pillar says that a node has no hotplug. What was plugged into running VMs stays there, and so do their taps. #}
{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- from tplroot ~ "/map.jinja" import brine, scripts_dir with context %}

{#- Its package would take that one with it. #}
include:
  - ..instance.clean

{%- if salt["service.available"]("brine-tap-gc.timer") %}

brine-clean-brine-tap-gc.timer:
  service.dead:
    - name: brine-tap-gc.timer
    - require:
      - pkg: brine-clean-instance-package
    - require_in:
      - pkg: brine-clean-hotplug-package
{%- endif %}

{#- The scripts first, or the package could not remove their folder. #}
{%- for name in brine.hotplug.scripts | sort if name is match("^[A-Za-z0-9_-]+$") %}

brine-clean-{{ scripts_dir }}/{{ name }}:
  file.absent:
    - name: {{ scripts_dir }}/{{ name }}
    - require:
      - pkg: brine-clean-instance-package
    - require_in:
      - pkg: brine-clean-hotplug-package
{%- endfor %}

brine-clean-hotplug-package:
  pkg.removed:
    - name: {{ brine.hotplug.package }}
    - require:
      - pkg: brine-clean-instance-package
