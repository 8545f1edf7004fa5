"""configs/countdown.yaml runs: the file itself, with a tiny model in place of the large one."""

from __future__ import annotations

from lit_grpo.callbacks.diagnosis.actions import read_journal
from lit_grpo.cli.main import main
from tests.paths import ROOT


def test_two_rollouts_of_countdown_with_a_tiny_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "configs/countdown.yaml").read_text()
    large = "policy: {path: Qwen/Qwen2.5-1.5B, gradient_checkpointing: true}"
    assert large in text
    letters = "".join(sorted({chr(c) for c in range(32, 127)} - {"\\", '"'})) + "\\n"
    shape = f'{{alphabet: "{letters}", width: 16, layers: 1, heads: 1, max_position: 1024}}'
    tiny = f"policy: {{tiny: {shape}, gradient_checkpointing: true}}"
    (tmp_path / "run.yaml").write_text(text.replace(large, tiny))
    changes = {
        "data.rollouts": "2", "data.prompts_per_rollout": "2", "data.group_size": "2",
        "data.engine.name": "transformers",
        "data.sampling.max_new_tokens": "4", "data.prompts.init_args.n": "20", "data.val_prompts": "null",
        "trainer.val_check_interval": "null", "trainer.accelerator": "cpu", "model.micro_batch_size": "2",
        "model.guards.max_truncated": "null", "trainer.logger": "false", "checkpoint.dirpath": "ckpt",
    }  # fmt: skip
    words = [f"--{key}={value}" for key, value in changes.items()]
    assert main(["fit", "--config", "run.yaml", *words]) == 0
    assert (tmp_path / "ckpt/last.ckpt").exists(), capsys.readouterr().err
    told = read_journal(next(tmp_path.glob("runs/*/findings.jsonl")))
    assert "truncation" in {line.get("diagnosis") for line in told}, "all answers are cut; the run goes on"
