{%- set tplroot = tpldir %}
{%- set brine = salt["slsutil.renderer"]("salt://" ~ tplroot ~ "/map.py", saltenv=saltenv) %}

{#- The name says it all: in test mode Salt replaces the comment. #}
brine-unknown-family:
  test.fail_without_changes:
    - name: Brine's states do not know the os_family {{ grains["os_family"] }}, only {{ brine.families | join(" and ") }}
    - comment: nothing was changed
