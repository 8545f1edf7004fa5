"""The configurations of the papers: each is whole, says what it needs without the hub, and trains for one rollout.

They run with a tiny model and a hub of a few rows (papers_stand_in.py) on the CPU. The layer of :func:`small` cuts
besides: cards, machines, lengths (8 tokens), groups (4 or 8), prompts (one to a minibatch, so that updates stay),
rollouts (one; VAPO's value pretraining and one more), evaluations, the engine (transformers), and the optimizer of
bitsandbytes, which runs on CUDA alone. All else is the configuration's own: objective, optimizer settings, updates,
data columns, filters, templates, rewards, 4-bit weights, adapters, monitors.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_grpo.cli.main import main
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.rewards import MathReward
from tests import tiny
from tests.configs.papers_stand_in import load_dataset, write_model
from tests.paths import ROOT

PAPERS = ROOT / "configs/papers"
TABLE = (PAPERS / "README.md").read_text(encoding="utf-8")
SINGLE = sorted(path.stem for path in PAPERS.glob("*.yaml"))
LANDSCAPE, GTPO = PAPERS / "landscape", PAPERS / "gtpo"


def landscape(model: str, data: str, method: str, *more: str) -> list[Path]:
    names = ("base", f"models/{model}", f"data/{data}", f"methods/{method}", *more)
    return [LANDSCAPE / f"{name}.yaml" for name in names]


def gtpo(model: str, data: str, method: str) -> list[Path]:
    return [GTPO / f"{name}.yaml" for name in ("base", f"models/{model}", f"data/{data}", f"methods/{method}")]


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


# Every file at least once. Methods under several updates are all resolved, in a test that runs none of them.
OFF, NEITHER = ("off_policy",), ("off_policy", "no_clip_no_importance_sampling")
PILES: dict[str, list[Path]] = {
    **{name: [PAPERS / f"{name}.yaml"] for name in SINGLE},
    **{f"landscape-{m}": landscape("qwen2.5-7b", "simplerl", m) for m in names(LANDSCAPE / "methods")},
    **{f"landscape-{m}-off": landscape("qwen2.5-7b", "simplerl", m, *OFF) for m in ("grpo", "pl")},
    **{f"landscape-{m}-neither": landscape("qwen2.5-7b", "simplerl", m, *NEITHER) for m in ("grpo", "rent")},
    **{
        f"landscape-{d}": landscape("qwen2.5-7b", d, "cl")
        for d in names(LANDSCAPE / "data") if d != "simplerl"
    },
    **{f"landscape-{m}": landscape(m, "simplerl", "grpo") for m in names(LANDSCAPE / "models") if m != "qwen2.5-7b"},
    "landscape-noise": landscape("qwen2.5-7b", "simplerl", "grpo", "noisy_rewards"),
    **{f"gtpo-{m}": gtpo("qwen2.5-3b-instruct", "gsm8k", m) for m in names(GTPO / "methods")},
    "gtpo-llama-math": gtpo("llama-3.1-8b-instruct", "math", "gtpo"),
    "gtpo-sft-math": gtpo("qwen2.5-3b-instruct", "math", "sft"),
}  # fmt: skip
EVALUATIONS = {
    "landscape": [LANDSCAPE / "models/qwen2.5-7b.yaml", LANDSCAPE / "eval.yaml"],
    "gtpo": [GTPO / "base.yaml", GTPO / "models/qwen2.5-3b-instruct.yaml", GTPO / "eval.yaml"],
}
GROUP = 4


class Look(tiny.Recorder):
    """A recorder that a test can find: the command line makes it."""

    last: Look
    module: Any
    datamodule: Any

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        Look.last, self.module, self.datamodule = self, pl_module, trainer.datamodule


def words(files: list[Path], *more: str) -> list[str]:
    return [*(word for file in files for word in ("--config", str(file))), *more]


def merged(files: list[Path]) -> dict[str, Any]:
    """The files laid one over the other: what the pile says of itself."""

    def over(below: Any, above: Any) -> Any:
        if not isinstance(below, dict) or not isinstance(above, dict) or "class_path" in above:
            return above
        return {**below, **{key: over(below.get(key), value) for key, value in above.items()}}

    whole: dict[str, Any] = {}
    for file in files:
        whole = over(whole, yaml.safe_load(file.read_text(encoding="utf-8")))
    return whole


def small(own: dict[str, Any], model: Path) -> dict[str, Any]:
    """The layer that cuts a pile down to this machine."""
    given = own["data"]["prompts_per_rollout"]
    # One prompt to a minibatch; in one update a few, so that not all groups are uniform by chance.
    prompts = given // own["model"]["minibatch_prompts"] if own["model"].get("minibatch_prompts") else min(given, 4)
    supervised = own["model"]["objective"]["recipe"] == "sft"
    pretraining = own["model"].get("critic", {}).get("warmup_rollouts", 0) > 0
    layer: dict[str, Any] = {
        "model": {
            "policy": {"path": str(model)},
            "minibatch_prompts": 1 if own["model"].get("minibatch_prompts") else None,
            "guards": {"max_truncated": None},
        },
        "data": {
            "prompts_per_rollout": prompts,
            "group_size": 1 if supervised else GROUP if prompts > 1 else 2 * GROUP,
            "rollouts": 2 if pretraining else 1,
            "sampling": {"max_new_tokens": 400 if supervised else 8},
            "val": None,
            "engine": {"name": "transformers", "max_num_seqs": 256, "gpu_memory_utilization": 0.4, "sleep": 0},
        },
        "trainer": {
            "accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False, "val_check_interval": None,
        },
    }  # fmt: skip
    if pretraining:
        layer["model"]["critic"] = {"warmup_rollouts": 1}
    # The penalty of DAPO ends at the run's limit.
    if own["model"]["objective"].get("overlong_max"):
        layer["model"]["objective"] = {"overlong_max": 8, "overlong_cache": 2}
    if str(own["model"]["optimizer"].get("type", "")).startswith("bitsandbytes"):
        layer["model"]["optimizer"] = {"type": "torch.optim.AdamW"}
    return layer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("papers") / "model")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the hub's stand-in, and with the file that numina_hard.yaml says how to make."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    # The workers of math-verify would cost each test seconds; what the stand-in writes is judged without them.
    monkeypatch.setattr(MathReward, "start", lambda reward: None)
    (tmp_path / "data").mkdir()
    rows = [{"prompt": f"What is {n} - {n - 1}?", "answer": "1", "pass_rate": 0.0, "samples": 2} for n in range(1, 9)]
    (tmp_path / "data/numina_hard.jsonl.gz").write_text("".join(json.dumps(row) + "\n" for row in rows))
    warnings.simplefilter("ignore")
    return tmp_path


@pytest.mark.parametrize("pile", PILES)
@pytest.mark.slow
def test_one_rollout(pile: str, here: Path, model: Path):
    own = merged(PILES[pile])
    layer = small(own, model)
    # The recorder beside the configuration's own monitors.
    layer["trainer"]["callbacks"] = [
        *own["trainer"]["callbacks"], {"class_path": "tests.configs.test_papers.Look"}
    ]  # fmt: skip
    (here / "small.yaml").write_text(yaml.safe_dump(layer))
    assert main(["fit", *words([*PILES[pile], here / "small.yaml"])]) == 0
    run = Look.last
    objective, given = run.module.objective, own["model"]["objective"]
    assert objective.recipe == given["recipe"]
    for name, value in given.items():
        if name not in ("recipe", "overlong_max", "overlong_cache"):
            assert getattr(run.module.objective_config, name) == value
    updates = own["model"].get("updates_per_rollout", 1)
    rollouts = layer["data"]["rollouts"]
    assert len(run.metrics) == rollouts
    for metrics in run.metrics:
        assert all(math.isfinite(value) for value in metrics.values()), metrics
    optimizer = run.module.optimizers()
    optimizer = optimizer[0] if isinstance(optimizer, list) else optimizer
    assert tuple(optimizer.param_groups[0]["betas"]) == tuple(own["model"]["optimizer"]["betas"])
    assert run.datamodule.rewards, "the configuration's own rewards"
    if objective.advantage.critic:
        assert run.module.critic_steps == rollouts * updates
    # Countdown's answers are expressions, which the stand-in never gives: nothing is right, and nothing is learnt.
    if pile == "landscape-countdown":
        assert run.metrics[-1]["groups/zero_std_frac"] == 1
        return
    trained = (rollouts - (1 if layer["model"].get("critic") else 0)) * updates
    assert run.module.optimizer_steps + run.module.empty_steps == trained
    assert run.module.optimizer_steps >= 1
    if not objective.demonstrations:
        assert 0 < run.metrics[-1]["reward/" + ("accuracy" if pile.startswith("gtpo") else "math")] < 10


@pytest.mark.parametrize("method", names(LANDSCAPE / "methods"))
def test_every_method_of_the_landscape_paper_takes_several_updates(method: str):
    """The axes of its figures: one update, four with clip and importance sampling, four without both, noisy labels."""
    for more in ((), OFF, NEITHER, ("noisy_rewards",), ("off_policy", "noisy_rewards")):
        model = merged(landscape("qwen2.5-7b", "simplerl", method, *more))["model"]
        objective = ObjectiveConfig(**model["objective"]).resolve().for_run(3072, model.get("updates_per_rollout", 1))
        assert objective.recipe == model["objective"]["recipe"]
        if more == NEITHER:
            assert "no_importance_sampling" in objective.name


def test_every_file_is_run_and_every_pile_is_in_the_table():
    run = {file for pile in (*PILES.values(), *EVALUATIONS.values()) for file in pile}
    assert set(PAPERS.rglob("*.yaml")) == run
    for path in run:
        name = path.relative_to(PAPERS)
        assert str(name) in TABLE or name.stem in TABLE, f"{name} is not in configs/papers/README.md"


def test_every_command_of_the_table_names_files_that_exist():
    found = re.findall(r"\$([LG])/([\w./-]+\.yaml)", TABLE) + re.findall(
        r"(configs/papers)/([a-z][\w./-]+\.yaml)", TABLE
    )
    assert len(found) > 10
    for kind, name in re.findall(r"^(Models|Data): (.*)$", TABLE, re.MULTILINE):
        for folder in (LANDSCAPE, GTPO):
            known = set(names(folder / kind.lower()))
            assert known <= set(re.findall(r"`([\w.-]+)`", TABLE)), name
    for root, name in found:
        folder = {"L": LANDSCAPE, "G": GTPO}.get(root, PAPERS)
        assert (folder / name).is_file(), name


@pytest.mark.parametrize("path", sorted(PAPERS.rglob("*.yaml")), ids=lambda p: str(p.relative_to(PAPERS)))
def test_every_file_says_where_its_values_stand_and_what_departs(path: Path):
    head = " ".join(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    assert re.search(r"section|Eq\.|Fig\.|App\.|appendix|Appendix|Table|Listing", head)
    if path.parent == PAPERS or path.name == "base.yaml":
        assert "Hardware:" in head
        assert re.search(r"Departures?", head)
        assert "ublished" in head


def test_every_training_file_names_its_data_by_hub_id():
    for pile in PILES.values():
        prompts = merged(pile)["data"]["prompts"]
        kind = prompts["class_path"].rpartition(".")[2]
        assert kind in ("HubPrompts", "BenchmarkPrompts", "CountdownPrompts", "JsonlPrompts")
        if kind == "HubPrompts":
            assert "/" in prompts["init_args"]["dataset"]


@pytest.mark.parametrize("pile", [*SINGLE, "landscape-ppo", "landscape-numina_hard", "gtpo-gtpo", "gtpo-sft"])
@pytest.mark.slow
def test_the_check_says_what_is_needed_without_the_hub(
    pile: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr("socket.socket.connect", None)
    (here / "data/numina_hard.jsonl.gz").unlink()
    assert main(["check", *words(PILES[pile], "--needs", "--json", "needs.json")]) == 0
    own = merged(PILES[pile])
    lines = {check["name"]: check for check in json.loads((here / "needs.json").read_text())["checks"]}
    assert {"model", "training data", "packages", "cards", "card memory", "disk"} <= set(lines)
    assert own["model"]["policy"]["path"] in lines["model"]["found"]
    assert lines["model"]["values"]["parameters"] > 1e9
    assert lines["model"]["status"] == "warn", "it is not on this machine"
    prompts = own["data"]["prompts"]["init_args"]
    assert str(prompts.get("dataset") or prompts.get("path") or "openai/gsm8k") in lines["training data"]["found"]
    assert lines["training data"]["status"] == "warn"
    trainer = own["trainer"]
    assert lines["cards"]["values"]["cards"] == trainer["devices"] * trainer.get("num_nodes", 1)
    assert lines["card memory"]["values"]["card_gb"] <= 141, "the hardware that the file names will do"
    named = re.search(r"cards? of (\d+) GB|H200 \((\d+) GB\)|one of (\d+) GB", PILES[pile][0].read_text())
    assert named
    assert lines["card memory"]["values"]["card_gb"] <= int(next(filter(None, named.groups())))
    assert ("critic" in lines["card memory"]["values"]) == (own["model"]["objective"]["recipe"] in ("ppo", "vapo"))
    assert "vllm" in lines["packages"]["found"] or own["model"]["objective"]["recipe"] == "sft"
    capsys.readouterr()


def test_a_check_ends_with_the_needs_and_then_the_missing_model(here: Path, capsys: Any):
    assert main(["check", *words([PAPERS / "dapo.yaml"])]) == 2
    told = capsys.readouterr()
    assert "open-r1/DAPO-Math-17k-Processed of the hub" in re.sub(r"\s+", " ", told.out)
    assert "the model Qwen/Qwen2.5-32B is no folder on this machine" in re.sub(r"\s+", " ", told.err)


@pytest.mark.parametrize("paper", EVALUATIONS)
@pytest.mark.slow
def test_the_evaluations(paper: str, here: Path, model: Path, capsys: Any):
    own = merged(EVALUATIONS[paper])
    layer = {
        "model": {"policy": {"path": str(model)}},
        "data": {
            "eval_sampling": {"max_new_tokens": 8},
            "engine": {"name": "transformers", "max_num_seqs": 256, "gpu_memory_utilization": 0.4},
            "test": {name: {**settings, "limit": 1} for name, settings in own["data"]["test"].items()},
        },
        "trainer": {"accelerator": "cpu", "logger": False, "enable_progress_bar": False},
    }  # fmt: skip
    (here / "small.yaml").write_text(yaml.safe_dump(layer))
    assert main(["test", *words([*EVALUATIONS[paper], here / "small.yaml"])]) == 0
    sets = json.loads(next(here.rglob("results.json")).read_text())["sets"]
    assert set(sets) == set(own["data"]["test"])
    for name, settings in own["data"]["test"].items():
        found = {int(key.partition("@")[2]) for key in sets[name]["metrics"] if re.fullmatch(r"pass@\d+", key)}
        assert found == set(settings.get("k", [1]))
        assert sets[name]["sampled"][0]["samples"] == settings.get("samples", 1)
    if paper == "gtpo":
        assert 0 < sets["gsm8k"]["metrics"]["pass@1"] < sets["gsm8k"]["metrics"]["pass@32"] == 1
    capsys.readouterr()
