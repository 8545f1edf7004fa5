"""The level of messages that LIT_GRPO_LOG names."""

import logging

import pytest

from lit_grpo.cli.main import main


@pytest.fixture(autouse=True)
def logger():
    """The project's logger, as it was before once the test is over."""
    logger = logging.getLogger("lit_grpo")
    level, handlers = logger.level, logger.handlers
    yield logger
    logger.setLevel(level)
    logger.handlers = handlers


def test_debug_messages_go_to_standard_error_with_their_rank(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_GRPO_LOG", "debug")
    for _ in range(2):
        assert main(["report", "nowhere"]) == 2
    capsys.readouterr()
    logging.getLogger("lit_grpo.somewhere").debug("waiting for %s", "the server")
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank 0 pid" in line
    assert line.endswith("lit_grpo.somewhere: waiting for the server")


def test_without_it_nothing_is_configured(monkeypatch, logger, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIT_GRPO_LOG", raising=False)
    before = logger.level, logger.handlers
    assert main(["report", "nowhere"]) == 2
    assert (logger.level, logger.handlers) == before


def test_an_unknown_level_is_bad_input(monkeypatch, capsys):
    monkeypatch.setenv("LIT_GRPO_LOG", "chatty")
    assert main(["report", "nowhere"]) == 2
    assert "there is no log level 'chatty'" in capsys.readouterr().err
