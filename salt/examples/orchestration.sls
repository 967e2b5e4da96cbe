---
# The whole fleet, in order: as /srv/salt/orch/brine.sls, by
#   salt-run state.orchestrate orch.brine
# The node that makes the cluster's configuration comes first. Then all others get theirs, ten at
# a time.

brine-writer:
  salt.state:
    - tgt: brine:config:apply:true
    - tgt_type: pillar
    - sls: brine

brine-other-nodes:
  salt.state:
    - tgt: I@brine:* and not I@brine:config:apply:true
    - tgt_type: compound
    - sls: brine
    - batch: 10
    - require:
        - salt: brine-writer
