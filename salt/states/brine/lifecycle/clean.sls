{#- Undoes brine.lifecycle, also where pillar says that a node has no handler. Instances with an owner do not start any more without the package. #}
{%- from "brine/map.jinja" import brine with context %}

brine-clean-lifecycle-package:
  pkg.removed:
    - name: {{ brine.lifecycle.package }}

brine-clean-/etc/brine/lifecycle.toml:
  file.absent:
    - name: /etc/brine/lifecycle.toml
    - require:
      - pkg: brine-clean-lifecycle-package
