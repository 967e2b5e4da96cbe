{#- What Salt loads on a minion of this formula's own: brine*.py in the folders beside this one. Applying one formula does not sync them, as applying all
    does. They come from the environment of this file, or else from base. Salt's own sync would remove the modules of other environments. #}
{%- set parent = tpldir.rpartition("/")[:2] | join %}
{%- set environment_of = {} %}
{%- for environment in ["base", saltenv] | unique %}
{%- for file in salt["cp.list_master"](environment, parent ~ "_") %}
{%- do environment_of.update({file: environment}) %}
{%- endfor %}
{%- endfor %}

{%- set synced = [] %}
{%- for kind in ["modules", "states", "grains", "beacons"] %}
{%- set folder = parent ~ "_" ~ kind ~ "/" %}
{%- for file, environment in environment_of | dictsort if file.startswith(folder ~ "brine") and file.endswith(".py") %}
{%- set copy = opts["extension_modules"] ~ "/" ~ kind ~ "/" ~ file.replace(folder, "") %}
{%- set newest = salt["cp.cache_file"]("salt://" ~ file, environment) %}
{%- if newest and not (salt["file.file_exists"](copy) and salt["file.get_hash"](copy) == salt["file.get_hash"](newest)) %}
{%- do synced.append(salt["cp.get_file"]("salt://" ~ file, copy, saltenv=environment, makedirs=true)) %}
{%- endif %}
{%- endfor %}
{%- endfor %}

{#- The reload is of this run, and of a minion that runs. Not of its beacons, before Salt 3008. #}
{%- if synced and opts["file_client"] != "local" %}
{%- do salt["saltutil.refresh_beacons"]() %}
{%- endif %}

brine-states-loaded:
  test.nop:
    - reload_grains: {{ (synced | length > 0) | json }}
    - force_reload_modules: {{ (synced | length > 0) | json }}
