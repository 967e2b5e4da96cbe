{#- What to do about an event of the beacon brine: the outbox of that node is recorded in the cluster's configuration. In the Salt master's configuration:

    reactor:
      - salt/beacon/*/brine/:
        - salt://brine/reactor/recorded.sls

    Salt lets any minion send any tag and data. So this is no more than a bell: the runner asks the node itself. #}
{%- if data.get("outbox") %}

brine-recorded:
  runner.brine.record:
    - args:
      - minion: {{ tag.split("/")[2] | json }}
{%- endif %}
