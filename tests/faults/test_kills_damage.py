"""Checkpoints that are damaged, foreign or of other settings: one screen before a model is loaded, no traceback."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_grpo.cli.main import BAD_INPUT, DONE, main
from lit_grpo.rewards import Reward
from lit_grpo.types import Score

pytestmark = pytest.mark.slow

CONFIG: dict[str, Any] = {
    "model": {
        "policy": {"tiny": {"layers": 1, "width": 16, "heads": 2}},
        "optimizer": {"lr": 1e-3},
        "objective": {"recipe": "grpo"},
    },
    "data": {
        "prompts": {"class_path": "lit_grpo.data.AdditionPrompts", "init_args": {"digits": 1}},
        "rewards": [{"class_path": "tests.faults.test_kills_damage.Even"}],
        "group_size": 4,
        "prompts_per_rollout": 4,
        "rollouts": 4,
        "sampling": {"max_new_tokens": 2},
    },
    "checkpoint": {"every_n_rollouts": 2, "keep_last": 3},
    "trainer": {"accelerator": "cpu", "enable_progress_bar": False},
}


class Even(Reward):
    """Reward of 1 where the ids sum to an even number, which is true of half of a random model's answers."""

    def score(self, batch: Any) -> list[Score]:
        return [Score(float(sum(item.completion.token_ids) % 2 == 0)) for item in batch]


class Odd(Even):
    """Another reward."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of four rollouts, saved after two and four."""
    folder = tmp_path_factory.mktemp("run")
    before = Path.cwd()
    os.chdir(folder)
    try:
        (folder / "c.yaml").write_text(yaml.safe_dump(CONFIG))
        assert main(["fit", "--config", "c.yaml", "--trainer.logger.run_name", "r"]) == DONE
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def run(finished, tmp_path, monkeypatch) -> Path:
    """A copy of it, the current folder."""
    shutil.copytree(finished, tmp_path / "w", symlinks=True)
    monkeypatch.chdir(tmp_path / "w")
    return tmp_path / "w"


LAST = Path("runs/r/checkpoints/last.ckpt")
NEWEST = Path("runs/r/checkpoints/rollout-000004.ckpt")


def resume(*options: str, path: Path = LAST, command: str = "fit") -> int:
    return main([command, "--config", "c.yaml", "--ckpt_path", str(path), "--data.rollouts", "5", *options])


def flipped(at: float) -> Any:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(len(content) * at)] ^= 0x10
        path.write_bytes(content)

    return damage


def cut(keep: float) -> Any:
    return lambda path: os.truncate(path, int(path.stat().st_size * keep))


class Payload:
    """Would run a command if it were unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


def _altered(change: Any) -> Any:
    def damage(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        torch.save(change(content), path)

    return damage


def _without(key: str) -> Any:
    return _altered(lambda content: {k: v for k, v in content.items() if k != key})


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("this is no checkpoint\n" * 1000),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "half": cut(0.5),
    "last byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "seal gone": lambda path: os.truncate(path, path.read_bytes().rfind(b'{"lit_grpo_seal"')),
    **{f"a byte at {at}": flipped(at) for at in (0.0005, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)},
    "a zip of something else": lambda path: torch.save({"a": 1}, path),
    "a list": lambda path: torch.save([1, 2], path),
    "a state_dict": lambda path: torch.save({"w": torch.zeros(2)}, path),
    "a pickle that runs": lambda path: torch.save({"state_dict": Payload()}, path),
    **{f"no {key}": _without(key) for key in ("lit_grpo", "loops", "callbacks", "optimizer_states", "state_dict")},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_one_screen_that_names_the_last_good_one(run, capsys, damage, monkeypatch):
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was made")

    monkeypatch.setattr("lit_grpo.learner.models.load_model", never)
    damage(NEWEST)
    assert resume() == BAD_INPUT
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "cannot be used" in err
    assert "rollout-000002.ckpt" in err
    assert not Path("pwned").exists()
    # What is offered works.
    monkeypatch.undo()
    os.chdir(run)
    assert resume(path=NEWEST.with_name("rollout-000002.ckpt")) == DONE


@pytest.mark.parametrize("command", ["validate", "test"])
def test_evaluations_check_it_too(run, capsys, command):
    flipped(0.5)(NEWEST)
    assert resume("--data.val", "{mine: {path: q.jsonl}}", command=command) == BAD_INPUT
    assert "rollout-000002.ckpt" in capsys.readouterr().err


def test_the_whole_one_goes_on(run):
    assert resume() == DONE
    assert (LAST.parent / "rollout-000005.ckpt").exists()


FITS_NOT = {
    "width": ["--model.policy.tiny.width", "32"],
    "layers": ["--model.policy.tiny.layers", "2"],
    "alphabet": ["--model.policy.tiny.alphabet", "9876543210+="],
    "LoRA": ["--model.policy.lora", "{rank: 2, alpha: 4}"],
    "critic": ["--model.critic", "{}"],
    "optimizer": ["--model.optimizer.type", "torch.optim.RMSprop"],
}


@pytest.mark.parametrize("options", FITS_NOT.values(), ids=FITS_NOT.keys())
@pytest.mark.parametrize("named", [False, True], ids=["", "named"])
def test_what_cannot_be_changed_is_refused_even_where_it_is_named(run, capsys, options, named):
    accept = ["--checkpoint.accept_changes", "model"] if named else []
    assert resume(*options, *accept) == BAD_INPUT
    err = capsys.readouterr().err
    assert "does not fit" in err
    assert options[0][2:].split(" ")[0] in err


CHANGES = {
    "recipe": ["--model.objective.recipe", "dapo"],
    "lr": ["--model.optimizer.lr", "0.005"],
    "weight decay": ["--model.optimizer.weight_decay", "0.3"],
    "group size": ["--data.group_size", "6"],
    "prompts": ["--data.prompts_per_rollout", "2"],
    "reward": ["--data.rewards", "[{class_path: tests.faults.test_kills_damage.Odd}]"],
    "data": ["--data.prompts.init_args.digits", "2"],
    "temperature": ["--data.sampling.temperature", "0.7"],
    "updates": ["--model.updates_per_rollout", "2"],
    "norm": ["--model.max_grad_norm", "0.5"],
    "seed": ["--seed_everything", "5"],
}


@pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES.keys())
def test_a_changed_setting_is_shown_and_applied_only_where_it_is_named(run, capsys, options):
    assert resume(*options) == BAD_INPUT
    err = capsys.readouterr().err
    key = options[0][2:]
    assert "other settings than it was saved with" in err
    assert "now" in err
    accept = " ".join(err.split()).partition("accept_changes ")[2].split()[0]
    assert key.startswith(accept) or accept.startswith(key)
    assert resume(*options, "--checkpoint.accept_changes", accept) == DONE
    assert (LAST.parent / "rollout-000005.ckpt").exists()
    # It is the run's own from then on: going on again needs no name.
    assert main(["fit", "--config", "c.yaml", "--ckpt_path", str(LAST), "--data.rollouts", "6", *options]) == DONE


FREE = {
    "micro-batches": ["--model.micro_batch_size", "2"],
    "evaluation": ["--data.eval_group_size", "2"],
    "checkpoints": ["--checkpoint.every_n_rollouts", "1"],
    "engine": ["--data.engine.batch_size", "3"],
}


@pytest.mark.parametrize("options", FREE.values(), ids=FREE.keys())
def test_what_changes_nothing_that_is_learned_may_change(run, options):
    assert resume(*options) == DONE


def test_an_accepted_key_that_does_not_exist_is_told(run, capsys):
    assert resume("--checkpoint.accept_changes", "model.optimiser.lr") == BAD_INPUT
    assert "model.optimizer.lr" in capsys.readouterr().err


def test_the_learning_rate_of_a_resume_is_what_it_says(run):
    from lit_grpo.tracking import read_metrics

    assert resume("--model.optimizer.lr", "0.005", "--checkpoint.accept_changes", "model.optimizer.lr") == DONE
    rates = [row["optim/lr"] for row in read_metrics("runs/r")]
    assert rates == pytest.approx([1e-3] * 4 + [5e-3])
    content = torch.load(LAST, weights_only=True)
    assert content["lr_schedulers"][0]["base_lrs"] == [0.005, 0.005]
    assert yaml.safe_load(Path("runs/r/config.yaml").read_text())["checkpoint"]["accept_changes"] is None
    # Its moments are those of the steps before.
    assert content["optimizer_states"][0]["state"][0]["step"] == 5


def test_secrets_are_not_kept_among_the_settings():
    from lit_grpo.run.changes import flat

    given = {"url": "http://user:pw@host/v1", "api_key": "sk-1", "lr": 1, "path": None}
    kept = flat(given, "data")
    assert (kept["data.lr"], kept["data.path"]) == (1, None)
    assert not any(secret in str(kept) for secret in ("pw", "sk-1"))
