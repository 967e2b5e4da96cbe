---
# The whole fleet, in order, without the reactor: as /srv/salt/orch/brine.sls, by
#   salt-run state.orchestrate orch.brine
# The node that makes the cluster's configuration comes first. Then all others get theirs, ten at
# a time.

# The master finds minions by the pillar that it has seen of them.
brine-pillar-seen:
  salt.function:
    - name: saltutil.refresh_pillar
    - tgt: '*'
    - kwarg:
        wait: true

brine-writer:
  salt.state:
    - tgt: brine:config:apply:true
    - tgt_type: pillar
    - sls: brine
    - require:
        - salt: brine-pillar-seen

brine-other-nodes:
  salt.state:
    - tgt: I@brine:* and not I@brine:config:apply:true
    - tgt_type: compound
    - sls: brine
    - batch: 10
    - require:
        - salt: brine-writer
