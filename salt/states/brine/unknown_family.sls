{%- set tplroot = tpldir %}
{%- import_yaml tplroot ~ "/osfamilymap.yaml" as families %}

{#- The name says it all: in test mode Salt replaces the comment. #}
brine-unknown-family:
  test.fail_without_changes:
    - name: Brine's states do not know the os_family {{ grains["os_family"] }}, only {{ families | sort | join(" and ") }}
    - comment: nothing was changed
