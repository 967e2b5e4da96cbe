{#- Undoes brine.master, also where pillar says that this host is not to have the master's commands. #}

brine-clean-master-package:
  pkg.removed:
    - name: brine-cluster
