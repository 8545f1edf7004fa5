"""Whole runs whose vLLM server is killed in the middle of a generation: on to the same weights, or a clean end."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.cli.main import main
from lit_grpo.engines.vllm_server.engine import VLLMServer
from tests.engines.vllm_server.test_engine import server_pids

pytestmark = pytest.mark.vllm
CONFIG = """\
model:
  policy:
    tiny: {layers: 2, width: 64, heads: 2}
  optimizer: {lr: 1.0e-2}
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts}
  rewards:
    - {class_path: tests.cli.test_fit.Even}
  group_size: 8
  prompts_per_rollout: 4
  rollouts: 3
  sampling: {max_new_tokens: 24}
"""
KILL_IN = 1
"""Number of the rollout, from 0, in which the server is killed."""
IN_THE_CHECK = 2
"""Generations before the first rollout, for the check of the first sync."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: Any) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "a.yaml").write_text(CONFIG)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.chdir(folder)
        yield folder
    for number, handler in handlers.items():
        signal.signal(number, handler)
    shutil.rmtree(folder, ignore_errors=True)


def fit(name: str, engine: str, *more: str) -> int:
    return main(
        ["fit", "--config", "a.yaml", f"--data.engine.name={engine}", f"--trainer.logger.run_name={name}", *more]
    )


def last_checkpoint(place: Path, name: str) -> Path:
    return place / "runs" / name / "checkpoints" / "last.ckpt"


def policy_weights(place: Path, name: str) -> dict[str, torch.Tensor]:
    content = torch.load(last_checkpoint(place, name), weights_only=True)
    assert content["lit_grpo"]["policy_version"] == 3
    return {name: tensor for name, tensor in content["state_dict"].items() if name.startswith("policy.")}


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> dict[str, torch.Tensor]:
    """Weights after the same run with the engine in this process."""
    assert fit("undisturbed", "vllm") == 0
    return policy_weights(place, "undisturbed")


@pytest.fixture
def killed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kills the server after the third completion of a generation; what was delivered by then."""
    generation: int = getattr(request, "param", IN_THE_CHECK + KILL_IN)
    delivered: list[int] = []
    calls = [0]
    generate = VLLMServer.generate

    def killing(self: VLLMServer, requests: Any, sampling: Any) -> Iterator[Any]:
        for count, completion in enumerate(generate(self, requests, sampling)):
            yield completion
            if calls[0] == generation and count == 2:
                os.kill(server_pids(self)[0], signal.SIGKILL)
                delivered.append(count + 1)
        calls[0] += 1

    monkeypatch.setattr(VLLMServer, "generate", killing)
    return delivered


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# Under the weights that were changed for the check, and in a rollout.
@pytest.mark.parametrize("killed", [0, IN_THE_CHECK + KILL_IN], indirect=True)
def test_a_run_goes_on_after_its_server_was_killed(
    place: Path, undisturbed: dict[str, torch.Tensor], killed: list[int]
) -> None:
    assert fit("recovered", "vllm_server", "--data.engine.server.on_failure=recover") == 0
    assert killed == [3]
    assert_equal(policy_weights(place, "recovered"), undisturbed)


def test_a_run_ends_with_a_checkpoint_and_can_go_on(
    place: Path, undisturbed: dict[str, torch.Tensor], killed: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit("stopped", "vllm_server") == 1
    assert killed == [3]
    captured = capsys.readouterr()
    assert "vLLM server failed" in captured.err
    assert "on_failure is stop" in captured.err
    assert "Traceback" not in captured.err
    path = last_checkpoint(place, "stopped")
    # A server that was quick had sent the rest by then: that rollout is learned from, and the next sync fails.
    assert torch.load(path, weights_only=True)["lit_grpo"]["policy_version"] in (KILL_IN, KILL_IN + 1)
    assert fit("resumed", "vllm", f"--ckpt_path={path}") == 0
    assert_equal(policy_weights(place, "resumed"), undisturbed)
