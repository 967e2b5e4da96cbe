{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

{%- set has_instances = brine.has_configuration and brine.parts.instance and brine.parts_fit %}

include:
  - .data
{%- if has_instances %}
  - ..instance.settings
{%- endif %}

{#- The cluster's instances of this node, which may start, so all that they need comes before. They are the last, as those of pillar that are to go may
    leave them their disks. #}
{%- if has_instances %}

brine-instances-from-config:
  brine_instance.from_config:
    - config: {{ ("/var/lib/brine/config.data" if brine.config.apply or brine.config.source else "") | json }}
    - node: {{ brine.node_name | json }}
    - declared: {{ (brine.specs | list + brine.elsewhere | list) | json }}
    - order: last
    - require:
      - file: brine-instance-settings
      - brine_config: brine-ssconf
{%- if brine.is_distributed and not brine.config.apply %}
      - brine_config: brine-config-files
{%- endif %}
{%- if brine.is_distributed and not (brine.config.source or brine.config.apply) %}
      - brine_config: brine-config-copied
{%- endif %}
{%- endif %}
