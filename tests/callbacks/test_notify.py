"""A person is told once of each diagnosis, and no server or command holds up, ends or betrays a run."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_grpo.callbacks import HealthMonitor, Monitor, Notify
from lit_grpo.callbacks.diagnosis.actions import read_journal
from lit_grpo.callbacks.monitors.monitor import REARM
from lit_grpo.callbacks.notify import FIELDS, Notifier
from lit_grpo.errors import StopRun, UserError
from lit_grpo.utils.ports import free_port
from tests.paths import ROOT
from tests.tracking.stand_in import StandIn, StandInLoader, make_trainer
from tests.waiting import PATIENCE, wait_until

SECRET = "T000/B111/s3cr3t"


@contextmanager
def server(status: int = 200, release: threading.Event | None = None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on loopback: (address with a secret path and query, the bodies that it got)."""
    got: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if release is not None:
                release.wait(PATIENCE)
            got.append({**json.loads(body), "_path": self.path, "_type": self.headers["Content-Type"]})
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}/{SECRET}?token=abc", got
    finally:
        if release is not None:
            release.set()
        http.shutdown()
        http.server_close()


class Between(Monitor):
    """Speaks in spans of steps: ``kind=(severity, first, last, first, last, ...)``."""

    keys = ("reward",)

    def __init__(self, **spans: tuple[Any, ...]) -> None:
        super().__init__()
        self.spans = spans

    def check(self, step: int, metrics: Mapping[str, float]) -> Any:
        for kind, (severity, *steps) in self.spans.items():
            if any(first <= step <= last for first, last in zip(steps[::2], steps[1::2], strict=True)):
                yield self.finding(kind, severity, f"{kind} is wrong", ("reward", 1, float("nan"), 1.0), onset=1)


def fit(folder: Path, monitor: Monitor, rollouts: int = 6, module: Any = None, **settings: Any) -> HealthMonitor:
    settings.setdefault("actions", {"critical": "log"})
    watcher = HealthMonitor([monitor], **settings)
    make_trainer(False, [watcher], default_root_dir=str(folder)).fit(module or StandIn(), StandInLoader(rollouts))
    return watcher


def test_one_message_says_everything(tmp_path):
    with server() as (address, got):
        monitor = Between(slow=("info", 1, 6), c_pl=("critical", 2, 6), truncated=("warning", 4, 6))
        fit(tmp_path / "my_run", monitor, notify=Notify(address))
    assert len(got) == 1, "not again each rollout, nor when something milder joins"
    message = got[0]
    assert (message["_path"], message["_type"]) == (f"/{SECRET}?token=abc", "application/json")
    assert set(FIELDS) == {key for key in message if not key.startswith("_")}
    assert (message["event"], message["run"]) == ("diagnosis", "my_run")
    assert message["folder"] == str(tmp_path / "my_run")
    assert (message["diagnosis"], message["severity"], message["step"], message["onset"]) == ("C_PL", "critical", 2, 1)
    assert message["action"] == "log"
    assert message["instead"] is None
    assert message["evidence"][0] == {
        "monitor": "Between", "finding": "c_pl", "onset": 1, "metric": "reward", "window": 1, "value": "nan",
        "threshold": 1.0, "before": None,
    }  # fmt: skip
    assert [e["finding"] for e in message["evidence"]] == ["c_pl", "slow"]
    assert message["text"].startswith("my_run: critical at step 2: C_PL. C_PL collapse, began at step 1")


def test_it_is_told_again_when_it_returns_after_it_was_over_and_when_it_gets_graver(tmp_path):
    with server() as (address, got):
        again = 3 + REARM + 5
        monitor = Between(c_pl=("critical", 2, 3, again, again), truncated=("warning", 1, 1))
        fit(tmp_path / "a", monitor, rollouts=again + 2, notify=Notify(address))
        assert [m["step"] for m in got] == [2, again]
        over = [line for line in read_journal(tmp_path / "a/findings.jsonl") if line["event"] == "over"]
        assert [(e["step"], e["kind"], e["diagnosis"], e["raised"]) for e in over] == [
            (1 + REARM + 1, "truncated", "truncation", 1),
            (3 + REARM + 1, "c_pl", "C_PL", 2),
        ]
        got.clear()

        class Worse(Between):
            def check(self, step: int, metrics: Mapping[str, float]) -> Any:
                self.spans = {"c_pl": ("warning" if step < 4 else "critical", 2, 9)}
                yield from super().check(step, metrics)

        fit(tmp_path / "b", Worse(), notify=Notify(address, severity="warning"))
    assert [(m["step"], m["severity"]) for m in got] == [(2, "warning"), (4, "critical")]


@pytest.mark.parametrize(("severity", "told"), [("critical", 0), ("warning", 1), ("info", 2)])
def test_the_least_severity_is_a_setting(tmp_path, severity, told):
    with server() as (address, got):
        monitor = Between(slow=("info", 1, 1), truncated=("warning", 3, 3))
        fit(tmp_path, monitor, notify=Notify(address, severity=severity))
    assert len(got) == told


def test_nobody_is_told_unless_asked_for_and_none_but_rank_0_tells(tmp_path, monkeypatch):
    assert HealthMonitor().notify is None
    with server() as (address, got):
        fit(tmp_path, Between(c_pl=("critical", 2, 2)))
        monkeypatch.setattr("lightning.pytorch.Trainer.is_global_zero", property(lambda self: False))
        watcher = fit(tmp_path, Between(c_pl=("critical", 2, 2)), notify=Notify(address))
    assert got == []
    assert watcher._notified == {"C_PL": "critical"}, "every rank counts alike"


def test_what_was_told_is_in_the_checkpoint(tmp_path):
    with server() as (address, got):
        first = fit(tmp_path / "a", Between(c_pl=("critical", 2, 9)), notify=Notify(address))
        torch.save(first.state_dict(), tmp_path / "state.pt")
        again = HealthMonitor([Between(c_pl=("critical", 1, 9))], {"critical": "log"}, notify=Notify(address))
        again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert again.state_dict() == first.state_dict()
        make_trainer(False, [again], default_root_dir=str(tmp_path / "b")).fit(StandIn(), StandInLoader(3))
    assert len(got) == 1


class Breaks(StandIn):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def during_step(self, batch_idx: int) -> None:
        if batch_idx == 2:
            raise self.error


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("boom\nand more"), "broke off: ValueError: boom"), (StopRun("all is lost"), "stopped: all is lost")],
)
def test_the_end_is_told_if_asked_for(tmp_path, error, said):
    with server() as (address, got):
        for on_end in (True, False):
            with pytest.raises(type(error)):
                fit(tmp_path, Between(), module=Breaks(error), notify=Notify(address, on_end=on_end))
    assert [(m["event"], m["explanation"], m["step"]) for m in got] == [("end", said, 3)]
    assert set(FIELDS) <= set(got[0])


def test_a_run_that_finished_and_one_that_was_stopped_say_so(tmp_path):
    with server() as (address, got):
        fit(tmp_path / "a", Between(), notify=Notify(address, on_end=True))
        fit(tmp_path / "b", Between(c_pl=("critical", 2, 2)), actions={}, notify=Notify(address, on_end=True))
    assert [(m["event"], m["run"], m["diagnosis"]) for m in got] == [
        ("end", "a", None), ("diagnosis", "b", "C_PL"), ("end", "b", "C_PL"),
    ]  # fmt: skip
    assert got[0]["explanation"] == "finished"
    assert got[1]["action"] == "stop"
    assert got[2]["explanation"].startswith("stopped by HealthMonitor: C_PL: ")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "lit_grpo.callbacks.notify"]


def many() -> Between:
    """Five diagnoses, one after the other."""
    names = ("c_pl", "c_nl", "tn_pl", "tn_nl", "advantage_inverted")
    return Between(**{name: ("critical", step, step) for step, name in enumerate(reversed(names), 1)})


def test_a_server_that_hangs_holds_nothing_up(tmp_path, caplog):
    with server(release=threading.Event()) as (address, _):
        before = time.monotonic()
        watcher = fit(tmp_path, many(), notify=Notify(address, timeout=0.5))
        seconds = time.monotonic() - before
    assert watcher.monitors[0].step == 6
    assert seconds < PATIENCE / 2, "the server would have answered after three minutes"
    assert len(warnings_of(caplog)) == 1
    assert SECRET not in caplog.text
    assert "abc" not in caplog.text


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_refuses_is_logged_once_and_without_the_secret(tmp_path, caplog, status):
    with server(status) as (address, got):
        fit(tmp_path, many(), notify=Notify(address))
    assert len(got) == 5
    said = warnings_of(caplog)
    assert len(said) == 1
    assert f"HTTP status {status}" in said[0]
    assert "the webhook at http://127.0.0.1:" in said[0]
    assert "s3cr3t" not in caplog.text
    assert "abc" not in caplog.text


def test_a_server_that_is_not_there(tmp_path, caplog):
    port = free_port()
    fit(tmp_path, many(), notify=Notify(f"http://127.0.0.1:{port}/{SECRET}"))
    said = warnings_of(caplog)
    assert len(said) == 1
    assert "ConnectionRefusedError" in said[0]
    assert "s3cr3t" not in caplog.text


def script(folder: Path, text: str) -> list[str]:
    path = folder / "tell.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_a_command_gets_json_and_environment(tmp_path):
    told = "sys.stdin.read() + '|' + os.environ['LIT_GRPO_DIAGNOSIS'] + '\\n'"
    text = f"import os, sys; open(sys.argv[1], 'a').write({told})"
    arguments = [*script(tmp_path, text), str(tmp_path / "told")]
    fit(tmp_path / "r", Between(c_pl=("critical", 2, 4)), notify=Notify(command=arguments, timeout=PATIENCE))
    message, name = (tmp_path / "told").read_text().strip().split("|")
    assert name == "C_PL"
    assert json.loads(message)["diagnosis"] == "C_PL"
    spelled = " ".join(f"'{a}'" for a in arguments)
    fit(tmp_path / "s", Between(c_nl=("critical", 2, 4)), notify=Notify(command=spelled, timeout=PATIENCE))
    assert (tmp_path / "told").read_text().strip().endswith("|C_NL"), "text is split as a shell does it"


@pytest.mark.parametrize(
    ("text", "said"),
    [("import sys; print('s3cr3t', file=sys.stderr); sys.exit(7)", "exit code 7"), (None, "FileNotFoundError")],
)
def test_a_command_that_fails_is_logged_once(tmp_path, caplog, text, said):
    command = ["/nowhere/tell", "s3cr3t"] if text is None else [*script(tmp_path, text), "s3cr3t"]
    fit(tmp_path / "r", many(), notify=Notify(command=command, timeout=PATIENCE))
    assert len(warnings_of(caplog)) == 1
    assert said in warnings_of(caplog)[0]
    assert "s3cr3t" not in caplog.text


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path, caplog):
    # A shell: it has started its child in milliseconds, on any machine long before it is given up.
    text = f"sleep {PATIENCE:.0f} & echo $! > '{tmp_path / 'pid'}'; wait"
    notifier = Notifier(Notify(command=["sh", "-c", text], timeout=3.0))
    with caplog.at_level(logging.WARNING):
        notifier.send(dict.fromkeys(FIELDS))
        notifier.close()
        wait_until(lambda: warnings_of(caplog), "the command is given up")
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    wait_until(lambda: not stat.exists() or stat.read_text().split()[2] == "Z", "the child is gone")


def test_the_body_can_be_what_a_service_expects(tmp_path):
    with server() as (address, got):
        body = {"content": "{text}", "username": "{run} {step}"}
        fit(tmp_path / "r", Between(c_pl=("critical", 2, 2)), notify=Notify(address, body=body))
    assert set(got[0]) == {"content", "username", "_path", "_type"}
    assert got[0]["username"] == "r 2"
    assert got[0]["content"].startswith("r: critical at step 2")


def test_the_address_may_stay_in_the_environment(tmp_path, monkeypatch):
    with server() as (address, got):
        monkeypatch.setenv("MY_WEBHOOK", address)
        fit(tmp_path, Between(c_pl=("critical", 2, 2)), notify=Notify("$MY_WEBHOOK"))
        assert len(got) == 1
        monkeypatch.delenv("MY_WEBHOOK")
        with pytest.raises(UserError, match="MY_WEBHOOK is not set"):
            fit(tmp_path, Between(), notify=Notify("$MY_WEBHOOK"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "neither a webhook nor a command"),
        ({"webhook": "file:///etc/passwd"}, "no http or https address"),
        ({"webhook": "hooks.example/s3cr3t"}, "no http or https address"),
        ({"webhook": "http://x", "severity": "fatal"}, "'fatal' is no severity"),
        ({"webhook": "http://x", "body": {"text": "{reward}"}}, "no field of a message"),
        ({"webhook": "http://x", "body": {"text": "{"}}, "HealthMonitor.notify.body"),
        ({"webhook": "http://x", "timeout": 0}, "must be above 0"),
        ({"command": " "}, "neither a webhook nor a command"),
    ],
)
def test_bad_settings_are_refused_and_not_shown(wrong, said):
    with pytest.raises(UserError) as error:
        HealthMonitor(notify=wrong)
    assert said in str(error.value)
    assert "s3cr3t" not in str(error.value)


def test_the_document_shows_settings_that_work(monkeypatch):
    text = (ROOT / "docs/monitors.md").read_text()
    part = text.partition("## Being told")[2].partition("\n## ")[0]
    examples = [yaml.safe_load(block.partition("```")[0]) for block in part.split("```yaml\n")[1:]]
    assert len(examples) >= 2
    for example in examples:
        settings = example["notify"]
        watcher = HealthMonitor(notify=settings)
        assert watcher.notify == Notify(**settings)
    for field in (*FIELDS, *Notify.__dataclass_fields__):
        assert f"`{field}`" in part
