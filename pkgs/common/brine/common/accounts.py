"""The accounts of this node: the ids of its users and groups are theirs."""

from __future__ import annotations

import contextlib
import grp
import pwd

from brine.common.uid_pool import Ranges

_MOST = 5


def account_of(number: int) -> str | None:
    """Who has a number as user id, or as group id, in words; None if nobody has.

    Directories such as LDAP are asked, too, where the node knows its users by them.
    """
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    with contextlib.suppress(KeyError):
        return f"group {grp.getgrgid(number).gr_name}"
    return None


def accounts_among(ranges: Ranges) -> dict[int, str]:
    """Who has numbers of *ranges*, in words, by number. Directories that do not list their users
    leave them out."""
    groups = {each.gr_gid: f"group {each.gr_name}" for each in grp.getgrall()}
    users = {each.pw_uid: each.pw_name for each in pwd.getpwall()}
    found = {**groups, **users}
    return {
        number: found[number]
        for number in sorted(found)
        if any(first <= number <= last for first, last in ranges)
    }


def listed(accounts: dict[int, str]) -> str:
    """Accounts in one line, with their numbers; of many the first."""
    shown = [f"{number} ({name})" for number, name in list(accounts.items())[:_MOST]]
    more = f" and {len(accounts) - _MOST} more" if len(accounts) > _MOST else ""
    return ", ".join(shown) + more
