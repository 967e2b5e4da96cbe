{#- What to do when a minion says that it has changed the cluster's configuration: the other nodes get theirs. In the Salt master's configuration:

    reactor:
      - brine/config/changed:
        - salt://brine/reactor/changed.sls

    Salt lets any minion send any tag and data. So this is no more than a bell: the runner looks whether the configuration has changed. #}
brine-redistributed:
  runner.brine.redistribute:
    - args:
      - if_changed: true
