"""A user's own parts, and what settings of the run change in the objective."""

from __future__ import annotations

import pytest
import torch

from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.advantages import AdvantageInputs
from lit_grpo.objectives.trust_regions import SurrogateInputs
from tests import tiny
from tests.learner.helpers import fit

HERE = "tests.learner.test_own_parts"


def twice_centred(inputs: AdvantageInputs) -> torch.Tensor:
    groups = inputs.groups
    return 2 * (inputs.rewards - groups.spread(groups.mean(inputs.rewards)))


def unbounded(inputs: SurrogateInputs) -> torch.Tensor:
    return inputs.ratio * inputs.advantages


def own_objective():
    return ObjectiveConfig(recipe="dr_grpo", truncated_reward="keep").resolve()


@pytest.mark.parametrize(
    ("own", "same_as"),
    [
        ({"custom_advantage": f"{HERE}.twice_centred"}, None),
        ({"custom_trust_region": f"{HERE}.unbounded"}, ObjectiveConfig()),
        ({"custom_objective": f"{HERE}.own_objective"}, ObjectiveConfig(recipe="dr_grpo", truncated_reward="keep")),
    ],
)
def test_own_parts_train(own, same_as):
    module, watch = fit(1, objective=ObjectiveConfig(**own))
    assert module.optimizer_steps == 1
    if same_as is not None:
        expected, _ = fit(1, objective=same_as)
        torch.testing.assert_close(tiny.weights(module), tiny.weights(expected))
    else:
        plain, plain_watch = fit(1, objective=ObjectiveConfig(advantage="group_mean"))
        assert watch.metrics[0]["policy/advantage_abs"] == pytest.approx(
            2 * plain_watch.metrics[0]["policy/advantage_abs"]
        )
        assert watch.metrics[0]["optim/grad_norm"] == pytest.approx(
            2 * plain_watch.metrics[0]["optim/grad_norm"], rel=1e-4
        )
        assert plain.optimizer_steps == 1


def test_own_advantage_from_the_command_line(tmp_path, monkeypatch):
    from lit_grpo.cli.main import main
    from tests.cli.test_fit import CONFIG, Seen

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def advantage(inputs):\n    return 0 * inputs.rewards\n")
    (tmp_path / "a.yaml").write_text(CONFIG)
    options = ["--model.objective.custom_advantage=mine.advantage", "--trainer.callbacks+=tests.cli.test_fit.Seen"]
    assert main(["fit", "--config", "a.yaml", "--trainer.logger=false", *options]) == 0
    module = Seen.trainer.lightning_module
    assert module.objective.name == "grpo+advantage=custom"
    assert (module.empty_steps, module.optimizer_steps) == (3, 0), "advantages of 0 leave nothing to learn"


def test_stale_samples_are_corrected_unless_the_user_chose(caplog):
    with caplog.at_level("INFO"):
        module = tiny.module(max_staleness=1)
    assert module.objective.sampler.kind == "tis_token"
    assert module.objective.name == "grpo+sampler_correction=tis_token"
    assert "sampler_correction is tis_token" in caplog.text
    assert tiny.module(max_staleness=1, objective=ObjectiveConfig(sampler_correction="none")).objective.name == "grpo"
    chosen = tiny.module(max_staleness=1, objective=ObjectiveConfig(sampler_correction="mis_token"))
    assert chosen.objective.sampler.kind == "mis_token"
    assert tiny.module(max_staleness=0).objective.sampler.kind == "none"
