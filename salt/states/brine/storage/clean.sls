{#- Undoes brine.storage, also where pillar says that a node has no storage units. Folders and the volumes in them stay, and so does
    what LVM knows of its physical volumes. #}

{#- Its package would take that one with it. #}
include:
  - ..instance.clean

brine-clean-storage-package:
  pkg.removed:
    - name: brine-storage
    - require:
      - pkg: brine-clean-instance-package

brine-clean-/etc/brine/storage.toml:
  file.absent:
    - name: /etc/brine/storage.toml
    - require:
      - pkg: brine-clean-storage-package
