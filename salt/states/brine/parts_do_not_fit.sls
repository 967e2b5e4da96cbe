{#- Else what is unwanted would be removed, and with it what needs it. The name says it all: in test mode Salt replaces the comment. #}
brine-parts-do-not-fit:
  test.fail_without_changes:
    - name: brine-instance, which this node has or is to have, needs brine-kvmd and brine-hotplug, of which pillar has one as not enabled
    - comment: nothing was changed
