{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - ..common

{%- if brine.parts.moves and brine.parts_fit %}

{#- Brine itself checks the settings before they are put in place: a mistake in pillar changes nothing. #}
brine-moves-settings:
{%- if brine.moves.settings %}
  file.managed:
    - name: /etc/brine/moves.toml
    - source: salt://{{ tplroot }}/files/settings.toml.jinja
    - template: jinja
    - context:
        part: moves
        manual: brine-moves.toml(5)
        settings: {{ brine.moves.settings | json }}
    - user: root
    - group: root
    - mode: '0644'
    - check_cmd: /usr/bin/python3 -I -m brine.moves.settings
    - tmp_ext: .toml
{%- else %}
  file.absent:
    - name: /etc/brine/moves.toml
{%- endif %}
    - require:
      - pkg: brine-packages

{#- Both work when the node boots, and a move's own unit starts with its first step. #}
{%- for unit in ["brine-claims.service", "brine-moves.service"] %}

brine-moves-{{ unit }}:
  service.enabled:
    - name: {{ unit }}
    - require:
      - pkg: brine-packages
{%- endfor %}
{%- endif %}
