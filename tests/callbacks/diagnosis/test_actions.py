"""What is done about a diagnosis is a name that exists; anything else is refused with the names that do."""

from __future__ import annotations

import pytest

from lit_grpo.callbacks.diagnosis.actions import DEFAULT_ACTIONS, check_actions
from lit_grpo.errors import UserError


def test_what_is_given_wins() -> None:
    assert check_actions(None, "HealthMonitor", alone=False) == DEFAULT_ACTIONS
    found = check_actions({"critical": "rollback", "entropy_collapse": "log"}, "HealthMonitor", alone=False)
    assert found == {**DEFAULT_ACTIONS, "critical": "rollback", "entropy_collapse": "log"}


@pytest.mark.parametrize(
    ("given", "alone", "said"),
    [
        ({"critcal": "stop"}, False, ["'critcal' is neither", "did you mean 'critical'? Severities are info"]),
        ({"zzzzzzzz": "stop"}, False, ["'zzzzzzzz' is neither", "remedy: Severities are info, warning, critical"]),
        ({"critical": "halt"}, False, ["'halt' is no action of M", "choose one of", "rollback"]),
        ({"critical": "rollback"}, True, ["'rollback' is no action of M", "put the monitor into a HealthMonitor"]),
    ],
)
def test_a_name_that_does_not_exist_is_refused(given: dict[str, str], alone: bool, said: list[str]) -> None:
    with pytest.raises(UserError) as error:
        check_actions(given, "M", alone=alone)
    for part in said:
        assert part in str(error.value)
    assert "None" not in str(error.value)
