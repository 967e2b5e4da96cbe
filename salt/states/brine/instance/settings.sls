{#- What a node is to have before any of its instances starts: the parts that run them, scripts for their NICs, and their settings. #}
{%- set tplroot = tpldir.rpartition("/")[0] %}
{%- set sls_root = tplroot | replace("/", ".") %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

include:
  - ..common
  - ..kvmd
  - ..hotplug
  - ..storage

{%- if brine.parts.instance and brine.parts_fit %}

{#- Brine itself checks the settings before they are put in place: a mistake in pillar changes nothing. All instances wait for them, and so for the parts
    that run them. #}
brine-instance-settings:
{%- if brine.instance.settings %}
  file.managed:
    - name: /etc/brine/instance.toml
    - source: salt://{{ tplroot }}/files/settings.toml.jinja
    - template: jinja
    - context:
        part: instance
        manual: brine-instance(1)
        settings: {{ brine.instance.settings | json }}
    - user: root
    - group: root
    - mode: '0644'
    - check_cmd: /usr/bin/python3 -I -m brine.instance.settings
    - tmp_ext: .toml
{%- else %}
  file.absent:
    - name: /etc/brine/instance.toml
{%- endif %}
    - require:
      - pkg: brine-packages
{%- if brine.parts.kvmd %}
      - sls: {{ sls_root }}.kvmd
{%- endif %}
      - sls: {{ sls_root }}.hotplug
{%- for folder in brine.storage.directories | unique if folder is string %}
      - brine_storage: {{ ("brine-storage " ~ folder) | json }}
{%- endfor %}
{%- if brine.storage.default_unit %}
      - brine_storage: brine-storage-default
{%- endif %}

{#- It is not started here: what should run now is for the states of instances. #}
brine-instance-at-boot:
  brine_unit.managed:
    - name: brine-instances.target
    - enabled: {{ brine.instance.at_boot | json }}
    - require:
      - pkg: brine-packages
{%- endif %}
