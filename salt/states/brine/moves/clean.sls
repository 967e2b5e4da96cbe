{#- Undoes brine.moves, also where pillar says that no instance moves to or from a node. #}

brine-clean-moves-package:
  pkg.removed:
    - name: brine-moves

brine-clean-/etc/brine/moves.toml:
  file.absent:
    - name: /etc/brine/moves.toml
    - require:
      - pkg: brine-clean-moves-package
