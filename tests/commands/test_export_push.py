"""``lit-grpo export --push`` against a stand-in for the hub, and the model card that every export writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_grpo.commands.export import PREFIX
from lit_grpo.policy.config import LoraConfig, PolicyConfig, TinyModel
from lit_grpo.policy.model.load import load_model, load_tokenizer
from tests.commands.hub_stand_in import TOKEN, Hub, hub_stand_in
from tests.paths import ROOT

pytestmark = pytest.mark.slow  # each test starts the program, several times

TINY = TinyModel(layers=1, width=16, heads=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose own card states a licence."""
    folder = tmp_path_factory.mktemp("models") / "SomeBase-0.1B"
    load_model(PolicyConfig(tiny=TINY)).save_pretrained(folder)
    load_tokenizer(PolicyConfig(tiny=TINY)).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en]\n---\n# Some base\n")
    return folder


def make_run(folder: Path, policy: PolicyConfig) -> Path:
    """A run of five rollouts as a fit leaves it, whose checkpoint is of the fourth."""
    settings = {
        "data.prompts.class_path": "lit_grpo.data.HubPrompts", "data.prompts.init_args.dataset": "openai/gsm8k",
        "data.rewards.0.class_path": "lit_grpo.rewards.MathReward", "data.rewards.0.init_args.weight": 2.0,
        "data.prompts_per_rollout": 4, "data.group_size": 8, "model.optimizer.lr": 1e-5,
        "data.sampling.temperature": 1.0, "data.sampling.max_new_tokens": 64,
    }  # fmt: skip
    weights = {PREFIX + name: tensor for name, tensor in load_model(policy).state_dict().items()}
    content = {
        "state_dict": weights,
        "hyper_parameters": {"policy": asdict(policy), "objective": {"recipe": "dapo", "clip_high": 0.3}},
        "callbacks": {"RunSettings": {"settings": settings}},
        "lit_grpo": {"policy_version": 4},
    }
    (folder / "checkpoints").mkdir(parents=True)
    torch.save(content, folder / "checkpoints" / "last.ckpt")
    lines: list[dict[str, Any]] = [{"step": s, "reward": s / 10} for s in range(1, 6)]
    lines[2] |= {"val/reward": 0.25, "val/gsm8k/pass@1": 0.25}
    lines[4] |= {"val/reward": 0.75}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    finding = {"event": "diagnosis", "diagnosis": "entropy_collapse", "severity": "warning", "step": 2}
    (folder / "findings.jsonl").write_text(json.dumps(finding) + "\n")
    tags = {
        "mlflow.source.name": "/home/somebody/bin/lit-grpo fit --config c.yaml --model.api_key sk-abcdefghijklmnopqr",
        "env.host": "secret-host",
        "env.torch": "2.13.0",
    }
    inputs = {"datasets": {"train": {"count": 7473}}}
    (folder / "run.json").write_text(json.dumps({"tags": tags, "inputs": inputs, "ended": "FINISHED"}))
    return folder


def export(*words: str, cwd: Path, **environment: str) -> tuple[int, str]:
    """Run the command as a person does: exit code and what it printed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(cwd / "hf"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lit_grpo", "export", *words],
        cwd=cwd, env=clean | settings | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_stand_in() as found:
        yield found


def head_of(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_a_push_makes_the_repository_and_uploads_what_was_written(base: Path, tmp_path: Path, hub: Hub):
    make_run(tmp_path / "runs" / "first", PolicyConfig(path=str(base)))
    words = ("--checkpoint", "runs/first", "--output", "out", "--push", "lab/first", "--private")
    code, out = export(*words, cwd=tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert code == 0, out
    assert f"pushed: {hub.url}/lab/first" in out
    assert hub.repositories == {"lab/first": True}
    assert hub.files == {
        f"lab/first/{path.relative_to(tmp_path / 'out')}": path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }
    assert {"README.md", "model.safetensors", "config.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert hub.messages == ["last.ckpt, exported by lit-grpo"]
    card = hub.files["lab/first/README.md"].decode()
    assert "# lab/first" in card
    assert 'from_pretrained("lab/first")' in card


def test_the_card_says_what_the_run_was_and_nothing_of_the_machine(base: Path, tmp_path: Path):
    make_run(tmp_path / "runs" / "first", PolicyConfig(path=str(base)))
    assert export("--checkpoint", "runs/first", "--output", "out", cwd=tmp_path)[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    head = head_of(card)
    assert head["license"] == "apache-2.0"
    assert head["datasets"] == ["openai/gsm8k"]
    assert head["library_name"] == "transformers"
    assert "dapo" in head["tags"]
    # The model folder is no name on the hub.
    assert "base_model" not in head
    for expected in (
        "| base model | the model folder `SomeBase-0.1B` |",
        "| licence | apache-2.0, as the base model's card states |",
        "| method | `dapo` with clip_high 0.3 |",
        "| training data | `HubPrompts` `openai/gsm8k`, 7473 prompts |",
        "| rewards | `MathReward` x 2.0 |",
        "| trained on | 4 rollouts of 4 prompts with 8 completions each |",
        "| versions | torch 2.13.0 |",
        # At the checkpoint's own step, and of what is measured more rarely the last before it.
        "| `reward` | 0.4 | 4 |",
        "| `val/reward` | 0.25 | 3 |",
        "| `val/gsm8k/pass@1` | 0.25 | 3 |",
        "- warning: entropy_collapse from step 2 to the end",
        "lit-grpo fit --config c.yaml --model.api_key **masked**",
    ):
        assert expected in card, f"{expected}\n{card}"
    for secret in ("secret-host", "somebody", str(tmp_path), "sk-abcdef"):
        assert secret not in card


def test_a_base_model_of_the_hub_is_named_in_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from lit_grpo.commands.model_card import make_card

    content = {"hyper_parameters": {"objective": {"recipe": "grpo"}}}
    policy = PolicyConfig(path="SomeLab/SomeModel-1B")
    card = make_card("mine", content, policy, tmp_path, adapter=True)
    head = head_of(card)
    assert head["base_model"] == "SomeLab/SomeModel-1B"
    assert (head["base_model_relation"], head["library_name"]) == ("adapter", "peft")
    assert "| licence | not stated beside the base model" in card
    assert "AutoPeftModelForCausalLM" in card
    # A folder that has moved since is no name on the hub.
    for path in ("/no/longer/here", "models/gone", "./gone"):
        moved = make_card("mine", content, PolicyConfig(path=path), tmp_path, adapter=False)
        assert "base_model" not in head_of(moved)
        assert f"| base model | the model folder `{Path(path).name}` |" in moved


def test_adapters_are_pushed_too(base: Path, tmp_path: Path, hub: Hub):
    pytest.importorskip("peft")
    make_run(tmp_path / "runs" / "first", PolicyConfig(path=str(base), lora=LoraConfig(rank=2)))
    words = ("--checkpoint", "runs/first", "--output", "out", "--adapter", "--push", "lab/adapters")
    code, out = export(*words, cwd=tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert code == 0, out
    assert {"lab/adapters/adapter_model.safetensors", "lab/adapters/README.md"} <= set(hub.files)
    assert head_of(hub.files["lab/adapters/README.md"].decode())["library_name"] == "peft"
    assert hub.repositories == {"lab/adapters": False}


@pytest.mark.parametrize(
    ("repository", "environment", "said", "remedy"),
    [
        ("lab/x", {"HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set", "hf upload lab/x OUTPUT"),
        ("lab/x", {}, "nobody is logged in", "hf auth login"),
        ("lab/x", {"HF_TOKEN": "hf_wrong"}, "the token is not valid (HTTP 401)", "hf auth login"),
        ("others/x", {"HF_TOKEN": TOKEN}, "the token may not write there (HTTP 403)", "a token that may write"),
        ("a/b/c", {"HF_TOKEN": TOKEN}, "no name of a repository", "ORGANISATION/NAME"),
        ("lab/x", {"HF_TOKEN": TOKEN, "HF_ENDPOINT": "http://127.0.0.1:9"}, "127.0.0.1 cannot be reached", "later"),
    ],
    ids=["offline", "no token", "wrong token", "foreign", "no name", "no hub"],
)
def test_what_cannot_be_pushed_is_said_before_anything_is_written(
    repository: str, environment: dict[str, str], said: str, remedy: str, tmp_path: Path, hub: Hub
):
    make_run(tmp_path / "run", PolicyConfig(tiny=TINY))
    words = ("--checkpoint", "run", "--output", "out", "--push", repository)
    code, out = export(*words, cwd=tmp_path, **{"HF_ENDPOINT": hub.url, **environment})
    flat = " ".join(out.split())
    assert code == 2, out
    assert said in flat
    assert remedy in flat
    assert "Traceback" not in out
    assert not (tmp_path / "out").exists()
    assert not hub.files


def test_an_upload_that_fails_leaves_the_folder_and_says_how_to_go_on(tmp_path: Path, hub: Hub):
    make_run(tmp_path / "run", PolicyConfig(tiny=TINY))
    hub.refuse = 400
    words = ("--checkpoint", "run", "--output", "out", "--push", "lab/x")
    code, out = export(*words, cwd=tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert code == 2, out
    assert "the disk of the hub is full" in " ".join(out.split())
    assert "hf upload lab/x out" in " ".join(out.split())
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_private_without_push_is_refused(tmp_path: Path):
    code, out = export("--checkpoint", "run", "--output", "out", "--private", cwd=tmp_path)
    assert code == 2
    assert "--push" in out
