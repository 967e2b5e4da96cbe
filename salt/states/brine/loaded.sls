{#- The states of this formula's own, in _states. Applying one formula does not sync them, as applying all does. They come from the environment of this
    file, or else from base. Salt's own sync would remove the modules of other environments. A minion that is there need not be told: each run looks
    anew what it has. #}
{%- set synced = [] %}
{%- for file in ["modules/brine.py", "states/brine_config.py", "states/brine_instance.py", "grains/brine.py"] %}
{%- set source = "salt://_" ~ file %}
{%- set copy = opts["extension_modules"] ~ "/" ~ file %}
{%- set own = salt["cp.cache_file"](source, saltenv) %}
{%- set newest = own or salt["cp.cache_file"](source, "base") %}
{%- if newest and not (salt["file.file_exists"](copy) and salt["file.get_hash"](copy) == salt["file.get_hash"](newest)) %}
{%- do synced.append(salt["cp.get_file"](source, copy, saltenv=saltenv if own else "base", makedirs=true)) %}
{%- endif %}
{%- endfor %}

brine-states-loaded:
  test.nop:
    - force_reload_modules: {{ (synced | length > 0) | json }}
