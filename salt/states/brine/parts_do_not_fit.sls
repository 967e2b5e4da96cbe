{%- set tplroot = tpldir %}
{%- from tplroot ~ "/map.jinja" import parts with context %}
{#- Else what is unwanted would be removed, and with it what needs it. The name says it all: in test mode Salt replaces the comment. #}
brine-parts-do-not-fit:
  test.fail_without_changes:
{%- if parts.instance %}
    - name: brine-instance, which this node has or is to have, needs brine-hotplug, which pillar has as not enabled
{%- else %}
    - name: brine-{{ "watcher" if parts.watcher else "lifecycle" }}, which this node is to have, needs brine-instance, which pillar has as not enabled
{%- endif %}
    - comment: nothing was changed
