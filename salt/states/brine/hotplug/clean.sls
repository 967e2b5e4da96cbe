{#- Undoes brine.hotplug, also where pillar says that a node has no hotplug. Plugged devices of running VMs stay there, and so do their taps. #}
{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

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
{%- for name in brine.hotplug.scripts | sort if name is match("[A-Za-z0-9_-]+\\Z") %}

brine-clean-{{ brine.hotplug.scripts_dir }}/{{ name }}:
  file.absent:
    - name: {{ brine.hotplug.scripts_dir }}/{{ name }}
    - require:
      - pkg: brine-clean-instance-package
    - require_in:
      - pkg: brine-clean-hotplug-package
{%- endfor %}

brine-clean-hotplug-package:
  pkg.removed:
    - name: brine-hotplug
    - require:
      - pkg: brine-clean-instance-package
