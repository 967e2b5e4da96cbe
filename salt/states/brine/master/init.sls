{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - ..common

{%- if brine.parts.master and brine.parts_fit %}

{#- The first command that wants a lock starts the service. #}
brine-master-locks:
  brine_unit.managed:
    - name: brine-lockd.socket
    - active: true
    - enabled: true
    - require:
      - pkg: brine-packages
{%- endif %}
