{#- The states of this formula's own, in _states. Applying one formula does not sync them, as applying all does. A minion that is there need not be
    told: each run looks anew what it has. #}
{%- set synced = salt["saltutil.sync_states"](refresh=False) %}

brine-states-loaded:
  test.nop:
    - force_reload_modules: {{ (synced | length > 0) | json }}
