"""A run that hangs ends within ten seconds of SIGTERM or the second Ctrl-C, and is saved where Python still runs."""

import signal

import pytest

from scripts.chaos_cases.signals import ENDINGS, attack

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("what", "ending", "code", "saved"),
    [
        ("reward function, in process", "SIGTERM", 143, True),
        ("reward that does not close", "Ctrl-C twice", 130, True),
        ("engine", "SIGTERM", 143, True),
        ("judge", "SIGTERM", 143, False),  # it hangs in the first rollout: there is nothing to save
        ("reward function, holding the lock", "Ctrl-C four times", -signal.SIGKILL, False),
    ],
)
def test_a_run_that_hangs_is_ended(what, ending, code, saved):
    assert ending in ENDINGS
    ended = attack(what, ending, patience=180.0)
    assert ended.hung
    # With the interpreter's lock held nothing of it can run, and the watching process kills it.
    assert (ended.code, ended.saved) in {(code, saved), (-signal.SIGKILL, saved)}, ended
