"""What a node notes of its instances when it shuts down."""

from __future__ import annotations

import pytest

from brine.instance.spec import Spec
from brine.instance.state import state_of
from brine.instance.states import Seen
from brine.instance.user_shutdown import stays_off


@pytest.mark.parametrize(
    ("admin_state", "source", "user_shutdown", "shut_down", "noted"),
    [
        ("up", "admin", "stop", True, True),
        ("up", "admin", "stop", False, False),
        ("up", "admin", "restart", True, False),
        ("down", "admin", "stop", True, False),
        ("down", "user", "stop", True, True),  # the cluster may not have heard
        ("down", "user", "stop", False, False),
        ("offline", "admin", "stop", True, False),
    ],
)
def test_only_what_should_be_up_and_its_user_shut_down_for_good(
    admin_state: str, source: str, user_shutdown: str, shut_down: bool, noted: bool
) -> None:
    spec = Spec(
        name="web1", admin_state=admin_state, admin_state_source=source, user_shutdown=user_shutdown
    )
    seen = Seen(spec, state_of(spec, None, user_shut_down=shut_down), None)
    assert stays_off(seen) is noted
