{#- Undoes brine.lifecycle, also where pillar says that a node has no handler. While an instance with an owner runs nothing is undone. Such
    instances do not start any more without the package. #}

include:
  - ..loaded

brine-clean-no-owned-instance-runs:
  brine_instance.none_running:
    - owned: true
    - require:
      - test: brine-states-loaded

brine-clean-lifecycle-package:
  pkg.removed:
    - name: brine-lifecycle
    - require:
      - brine_instance: brine-clean-no-owned-instance-runs

brine-clean-/etc/brine/lifecycle.toml:
  file.absent:
    - name: /etc/brine/lifecycle.toml
    - require:
      - pkg: brine-clean-lifecycle-package
