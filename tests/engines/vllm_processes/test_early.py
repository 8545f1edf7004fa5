"""Engine processes that start beside the learner: what overlaps on a card and what must not, and how it is given up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.engines import EngineConfig
from lit_grpo.engines.base import EngineError
from lit_grpo.engines.vllm_processes import choose, early, measured, reserve
from lit_grpo.engines.vllm_processes.early import EarlyProcesses
from lit_grpo.engines.vllm_processes.group import EngineGroup
from lit_grpo.engines.vllm_processes.process import EngineProcess, Gone
from lit_grpo.engines.vllm_server.process_log import ProcessLog
from lit_grpo.engines.vllm_server.scratch import remove_scratch_folder
from lit_grpo.errors import UserError
from lit_grpo.policy import LoraConfig, PolicyConfig, TinyModel
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.policy.model.load import load_model
from lit_grpo.policy.outline import PolicyOutline
from lit_grpo.rollout import engine_start
from lit_grpo.types import Sampling
from tests import tiny
from tests.engines.vllm_processes.test_group import StandIn
from tests.engines.vllm_processes.test_process import alive, below
from tests.paths import ROOT
from tests.waiting import wait_until

SIZE, OTHER_SIZE = 700, 600


class Gated(StandIn):
    """A stand-in that imports and builds when it may, and refuses sizes that do not fit."""

    may_import: threading.Event
    may_build: threading.Event
    fits: Callable[[int | None], bool]
    closed: list[Any]

    def send(self, message: tuple[Any, ...]) -> None:
        if message[0] == "prepare":
            self.seen.append(("prepare",))
        if message[0] == "build" and not self.fits(message[2].get("kv_cache_memory_bytes")):
            self.seen.append(("build", message[2]["kv_cache_memory_bytes"]))
            self.answers.append(("failed", EngineError("out of memory")))
            return
        super().send(message)

    def receive(self, seconds: float | None = None) -> tuple[Any, ...]:
        assert (self.may_import if self.answers[0][0] == "prepared" else self.may_build).wait(60)
        if self in self.closed:
            raise Gone
        return super().receive(seconds)

    def close(self) -> None:
        self.closed.append(self)
        self.may_import.set()
        self.may_build.set()


@pytest.fixture
def make_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(card: bool) -> EngineGroup:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(reserve, "EngineProcess", Gated)
        values: dict[str, Any] = {"seen": [], "closed": [], "measures": SIZE if card else None,
                                  "fits": staticmethod(lambda size: True), "may_import": threading.Event(),
                                  "may_build": threading.Event()}  # fmt: skip
        for name, value in values.items():
            monkeypatch.setattr(Gated, name, value, raising=False)
        (tmp_path / "scratch").mkdir()
        return EngineGroup(2, None, tmp_path / "scratch", progress_seconds=300.0)

    return make


def built() -> list[Any]:
    return [one for one in Gated.seen if one[0] != "prepare"]


def let(*events: threading.Event) -> None:
    for event in events:
        event.set()


BUILD: Any = ("folder", {}, None)


def test_on_a_cpu_all_of_it_goes_on_beside_the_caller(make_group: Any) -> None:
    group = make_group(card=False)
    group.prepare_ahead()
    group.build_ahead(BUILD)
    assert built() == []
    assert not group.built_ahead
    let(Gated.may_import, Gated.may_build)
    wait_until(lambda: group.built_ahead, "engines that wait for the learner")
    wait_until(lambda: built() == [("build", None)] * 2 + [("ready",)] * 2, "engines that nobody has asked for yet")
    group.start()
    assert len(built()) == 4
    assert group.whole
    group.close()


def test_on_a_card_nothing_is_measured_beside_the_learner(make_group: Any) -> None:
    """The learner takes and frees memory until `start`; then one measures alone and the other takes what it found."""
    group = make_group(card=True)
    let(Gated.may_import, Gated.may_build)
    group.prepare_ahead()
    group.build_ahead(BUILD)
    for future in group._begun:
        future.result(60)
    assert Gated.seen == [("prepare",)] * 2, "imported, and not built"
    assert not group.built_ahead, "the learner need not wait for what waits for it"
    group.start()
    assert built() == [("build", None), ("ready",), ("build", SIZE), ("ready",)]
    group.close()


def test_what_an_earlier_run_has_measured_is_built_with_at_once(make_group: Any) -> None:
    group = make_group(card=True)
    let(Gated.may_import, Gated.may_build)
    group.prepare_ahead()
    group.build_ahead(BUILD, SIZE)
    wait_until(lambda: built() == [("build", SIZE)] * 2 + [("ready",)] * 2, "engines beside the learner")
    group.start()
    assert group.facts["cache_bytes"] == SIZE
    group.close()


def test_a_size_of_an_earlier_run_that_does_not_fit_is_measured_anew(make_group: Any, caplog: Any) -> None:
    group = make_group(card=True)
    let(Gated.may_import, Gated.may_build)
    Gated.fits = staticmethod(lambda size: size != OTHER_SIZE)
    group.prepare_ahead()
    group.build_ahead(BUILD, OTHER_SIZE)
    group.start()
    # The second was told the size too before the first had refused.
    assert built()[:2] == [("build", OTHER_SIZE)] * 2
    assert built()[-4:] == [("build", None), ("ready",), ("build", SIZE), ("ready",)]
    assert group.facts["cache_bytes"] == SIZE
    assert "measures anew" in caplog.text
    group.close()


def test_a_failure_ahead_is_that_of_the_start(make_group: Any) -> None:
    group = make_group(card=False)
    let(Gated.may_import, Gated.may_build)
    Gated.fits = staticmethod(lambda size: size is None)
    group.prepare_ahead()
    group.build_ahead(("folder", {"kv_cache_memory_bytes": OTHER_SIZE}, None))
    with pytest.raises(EngineError, match="out of memory"):
        group.start()
    group.close()


def test_what_is_given_up_meanwhile_starts_nothing_more(make_group: Any, tmp_path: Path) -> None:
    group = make_group(card=False)
    group.prepare_ahead()
    group.build_ahead(BUILD)
    wait_until(lambda: len(Gated.seen) == 2, "both processes")
    group.close()
    for future in group._begun:
        wait_until(future.done, "the thread's end")
    assert len(Gated.closed) == 2
    assert built() == []
    assert not (tmp_path / "scratch").exists()


@pytest.mark.slow
def test_a_closed_process_is_not_started_and_one_who_waits_for_it_learns_of_it(tmp_path: Path) -> None:
    log = ProcessLog()
    process = EngineProcess({}, tmp_path / "scratch", log)
    # Other tests of this process have children too.
    before = set(below(os.getpid()))
    process.start()
    pids = set(below(os.getpid())) - before
    assert pids
    ended: list[type[BaseException]] = []

    def listen() -> None:
        try:
            process.receive(600.0)
        except Gone as error:
            ended.append(type(error))

    waiting = threading.Thread(target=listen, daemon=True)
    waiting.start()
    process.close()
    waiting.join(60)
    assert ended == [Gone]
    with pytest.raises(Gone):
        process.start()
    wait_until(lambda: not any(map(alive, pids)), "its end")
    log.close()


# -------------------------------------------------------------------------------------------------- what is kept


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lit-grpo" / "engine_memory.json"


def test_a_measurement_is_kept_for_the_same_model_settings_and_card(cache: Path, monkeypatch: Any) -> None:
    model, options = {"hidden_size": 64}, {"max_num_seqs": 8, "seed": 1, "end_token_ids": (2,)}
    key = measured.key(model, options, 2)
    assert measured.read(key) is None
    measured.write(key, None)
    assert not cache.exists()
    measured.write(key, SIZE)
    assert measured.read(measured.key(model, options | {"seed": 5, "end_token_ids": (3,)}, 2)) == SIZE
    others = [
        measured.key({"hidden_size": 65}, options, 2),
        measured.key(model, options | {"max_num_seqs": 9}, 2),
        measured.key(model, options, 3),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"name": "A", "total_memory": 9}))
    others.append(measured.key(model, options, 2))
    monkeypatch.setattr(measured, "_version", lambda package: "another")
    others.append(measured.key(model, options, 2))
    assert len({key, *others}) == 6
    assert all(measured.read(other) is None for other in others)


def test_only_the_newest_measurements_are_kept_and_nonsense_is_none(cache: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(measured, "_MOST", 2)
    for number, key in enumerate("abc", 1):
        measured.write(key, number)
    assert [measured.read(key) for key in "abc"] == [None, 2, 3]
    for text in ("{", "[]", '{"a": "much"}', '{"a": -1}'):
        cache.write_text(text)
        assert measured.read("a") is None
    measured.write("a", 5)
    assert measured.read("a") == 5


def test_without_a_place_for_it_the_run_goes_on(cache: Path) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.write_text("a file")
    measured.write("a", 5)
    assert measured.read("a") is None


# -------------------------------------------------------------------------------------------------- the outline


@pytest.mark.parametrize(
    "config",
    [
        PolicyConfig(tiny=TinyModel()),
        PolicyConfig(tiny=TinyModel(experts=4), dtype="bfloat16"),
        PolicyConfig(tiny=TinyModel(), lora=LoraConfig(rank=4), gradient_checkpointing=True),
    ],
    ids=["dense", "experts", "adapters"],
)
def test_the_outline_of_a_policy_is_the_policy_without_weights(config: PolicyConfig) -> None:
    if config.lora is not None:
        pytest.importorskip("peft")
    state = torch.get_rng_state()
    outline, policy = PolicyOutline(config), Policy(load_model(config))
    assert outline.model.config.to_dict() == policy.model.config.to_dict()
    assert type(outline.model) is type(policy.model)
    assert {p.device.type for p in outline.model.parameters()} == {"meta"}
    for form in ("merged",) if config.lora is None else ("merged", "apart", "adapters"):
        shapes = [{name: w.shape for name, w in one.named_weights(form)} for one in (outline, policy)]  # type: ignore
        assert shapes[0] == shapes[1]
    assert torch.equal(torch.get_rng_state(), state)


# -------------------------------------------------------------------------------------------------- the data module


class Started:
    """An engine's start that notes what happens to it, and how far the learner is then."""

    def __init__(self, data: Any, notes: list[str]) -> None:
        self.data, self.notes = data, notes

    def _note(self, what: str) -> None:
        self.notes.append(f"{what}, {'a' if self.data.learner.policy is not None else 'no'} policy")

    def build(self, context: Any) -> None:
        self._note(f"build for {context.max_model_len} tokens")

    def finish(self, context: Any) -> Any:
        self._note(f"finish for {context.max_model_len} tokens")
        from lit_grpo.engines.registry import make_engine

        return make_engine(EngineConfig(name="transformers"), context)

    def close(self) -> None:
        self.notes.append("close")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A data module whose engine begins early, and what happens to that start."""
    notes: list[str] = []
    data = tiny.data(rollouts=1)
    monkeypatch.setattr(engine_start, "begins_early", lambda config: True)

    def begin(config: Any, context: Any) -> Any:
        started = Started(data, notes)
        started._note("begin")
        return started

    monkeypatch.setattr(engine_start, "begin_engine", begin)
    return data, notes


def test_the_engine_is_begun_before_the_model_and_finished_after_it(noted: Any) -> None:
    data, notes = noted
    tiny.trainer().fit(tiny.module(), datamodule=data)
    # Two digits, two signs, and five new tokens.
    assert notes == ["begin, no policy", "build for 9 tokens, no policy", "finish for 9 tokens, a policy"]


@pytest.mark.parametrize("hook", ["configure_model", "on_fit_start"])
def test_a_learner_that_fails_gives_the_start_up(noted: Any, hook: str) -> None:
    data, notes = noted

    class Failing(type(tiny.module())):  # type: ignore[misc]
        pass

    def fail(self: Any) -> None:
        raise ValueError("no memory")

    setattr(Failing, hook, fail)
    learner = Failing(policy=PolicyConfig(tiny=tiny.TINY))
    with pytest.raises(ValueError, match="no memory"):
        tiny.trainer().fit(learner, datamodule=data)
    assert notes[-1] == "close"


def test_bad_prompts_end_what_was_begun(noted: Any) -> None:
    data, notes = noted
    data.sampling = Sampling(max_new_tokens=10**6)
    with pytest.raises(UserError, match="positions"):
        tiny.trainer().fit(tiny.module(), datamodule=data)
    assert notes == ["begin, no policy", "close"]


def test_a_policy_that_is_another_after_all_gets_processes_of_its_own(monkeypatch: Any, tmp_path: Path) -> None:
    """Whoever brings their own learner may make another model than its settings say."""
    begun: list[Any] = []

    class Group:
        facts: dict[str, Any] = {"max_model_len": 9, "vocab_size": 9}  # noqa: RUF012

        def __init__(self, count: int, build: Any, scratch: Path, **kwargs: Any) -> None:
            self.closed, self.scratch = False, scratch
            begun.append(self)

        def prepare_ahead(self) -> None: ...

        def build_ahead(self, build: Any, cache_bytes: Any = None) -> None:
            self.model = build[0]

        def connect(self, **kwargs: Any) -> None:
            self.policy_model = kwargs["policy_model"]

        def start(self) -> None: ...

        def close(self) -> None:
            self.closed = True
            remove_scratch_folder(self.scratch)

    monkeypatch.setattr(early, "EngineGroup", Group)
    monkeypatch.setattr(early, "check_in_process", lambda: None)
    monkeypatch.setattr("lit_grpo.engines.vllm_processes.engine.check_in_process", lambda: None)
    from lit_grpo.engines import EngineContext
    from lit_grpo.engines.config import VLLMEngineConfig

    def context(policy: Any) -> EngineContext:
        return EngineContext(policy, PolicyConfig(tiny=tiny.TINY), None, (1,), 9, 0)

    said, made = PolicyOutline(PolicyConfig(tiny=tiny.TINY)), Policy(load_model(PolicyConfig(tiny=TinyModel(width=64))))
    start = EarlyProcesses(context(said), VLLMEngineConfig(), 2)
    start.build(context(said))
    engine = start.finish(context(made))
    assert [group.closed for group in begun] == [True, False]
    assert begun[1].policy_model is made.model
    engine.close()

    same = EarlyProcesses(context(said), VLLMEngineConfig(), 2)
    same.build(context(said))
    same.finish(context(Policy(load_model(PolicyConfig(tiny=tiny.TINY))))).close()
    assert len(begun) == 3
    assert not any(group.scratch.exists() for group in begun)


@pytest.mark.parametrize("own", [True, False])
def test_what_auto_chose_is_said_once(monkeypatch: Any, caplog: Any, own: bool) -> None:
    """Also where the data module has asked before whether there is anything to begin."""
    made: list[str] = []
    monkeypatch.setattr(choose, "choose", lambda config, context: choose.Choice(2 if own else 1, own, "of a test"))

    def makes(what: str, result: str) -> Any:
        def make(*args: Any, **kwargs: Any) -> str:
            made.append(what)
            return result

        return make

    monkeypatch.setattr(early, "EarlyProcesses", makes("processes", "begun"))
    monkeypatch.setattr("lit_grpo.engines.vllm.engine.VLLMEngine.from_context", makes("engine", "made"))
    context: Any = None
    with caplog.at_level("INFO"):
        begun = choose.VLLM.begin(context, processes="auto")
        assert begun == ("begun" if own else None)
        if begun is None:
            assert choose.VLLM.from_context(context, processes="auto") == "made"
    assert caplog.text.count("auto is") == 1
    assert made == ["processes" if own else "engine"]


# -------------------------------------------------------------------------------------------------- with vLLM

CONFIG = """
model:
  policy: {{tiny: {{layers: 2, width: 64, heads: 2}}}}
data:
  prompts: {{class_path: lit_grpo.data.AdditionPrompts, init_args: {{digits: 1}}}}
  rewards: [{{class_path: tests.tiny.EvenReward}}]
  group_size: 4
  prompts_per_rollout: 4
  rollouts: 1
  sampling: {{max_new_tokens: 8}}
  engine: {{name: vllm, processes: 2, max_num_seqs: 8, args: {{kv_cache_memory_bytes: 67108864, {args}}}}}
trainer: {{accelerator: cpu, logger: {{class_path: lit_grpo.tracking.RunLogger, init_args: {{run_dir: {folder},
  tracking_uri: none}}}}}}
"""
SLOW_MODEL = """
import signal, sys, time
# A shell without job control starts what is in its background deaf to Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
from lit_grpo import LitGRPO
from lit_grpo.cli.main import main

def wait(self):
    print("the model is made", flush=True)
    time.sleep(600)

LitGRPO.configure_model = wait
sys.exit(main(sys.argv[1:]))
"""


def command(tmp_path: Path, args: str = "") -> list[str]:
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path / "run", args=args))
    return ["fit", "--config", str(tmp_path / "run.yaml")]


@pytest.mark.vllm
def test_what_vllm_refuses_ahead_is_one_screen(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "lit_grpo.cli.main", *command(tmp_path, "block_sise: 16")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert "vLLM has no engine argument block_sise" in run.stderr
    assert "did you mean block_size" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.vllm
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["Ctrl-C", "SIGTERM", "kill -9"])
def test_a_run_that_is_ended_while_its_processes_start_leaves_none(tmp_path: Path, way: signal.Signals) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", SLOW_MODEL, *command(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert run.stdout is not None
        said = next((line for line in run.stdout if "the model is made" in line), None)
        assert said is not None, "it ended before"
        started = below(run.pid)
        engines = [pid for pid in started if b"vllm_processes.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(engines) >= 2, "they start while the model is made"
        # The first Ctrl-C lets what is under way come to its end, which this model never does.
        for _ in range(2 if way is signal.SIGINT else 1):
            os.killpg(run.pid, way)
            time.sleep(1)
        run.wait(timeout=120)
    finally:
        run.kill()
        run.wait()
    wait_until(lambda: not any(map(alive, started)), f"the end of {started}", seconds=60)
