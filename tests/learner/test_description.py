"""What is trained and how, in words."""

import doctest

import pytest
import torch

from lit_grpo.learner.description import batch_in_words, memory_in_words, parameter_count
from lit_grpo.policy.config import OptimizerConfig
from lit_grpo.terminal import figures
from tests import tiny


def test_examples_in_docstrings():
    result = doctest.testmod(figures)
    assert result.attempted > 0
    assert result.failed == 0


def test_parameters_are_counted():
    model = torch.nn.Linear(100, 30)
    assert parameter_count(model) == "3 k parameters"
    model.bias.requires_grad_(False)
    assert parameter_count(model) == "3 k parameters, 3 k are trained"
    model.packed = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    assert parameter_count(model) == "quantized, 3 k parameters are trained"


def test_memory_counts_shared_weights_once_and_only_what_is_known():
    model = torch.nn.Linear(1000, 250, bias=False)  # 1 MB of float32
    assert memory_in_words([model, model, None], OptimizerConfig()).startswith("4 MB at least: ")
    own = memory_in_words([model], OptimizerConfig(type="my.Optimizer"))
    assert own == "1 MB of weights, 1 MB of gradients"


@pytest.mark.parametrize(
    ("updates", "minibatch", "end"),
    [
        (1, None, "= 64 a rollout, one optimizer step"),
        (1, 8, "= 64 a rollout, one optimizer step"),
        (4, 2, "= 64 a rollout, 4 optimizer steps of 16"),
        (2, None, "= 64 a rollout, 2 optimizer steps of 64"),
    ],
)
def test_batches_in_words(updates, minibatch, end):
    assert batch_in_words(8, 8, updates, minibatch) == f"8 prompts x 8 completions {end}"


def test_a_run_describes_itself(tmp_path):
    from tests.tracking.stand_in import make_trainer

    module, data = tiny.module(), tiny.data(rollouts=1)
    make_trainer(False, [], default_root_dir=tmp_path).fit(module, datamodule=data)
    facts = module.describe_run() | data.describe_run()
    count = sum(p.numel() for p in module._policy.model.parameters())
    assert facts["recipe"] == "grpo"
    assert facts["model"] == f"tiny, of random weights: {count / 1000:.1f} k parameters"
    assert facts["batch"] == "4 prompts x 4 completions = 16 a rollout, one optimizer step"
    assert facts["engine"] == "transformers"
    assert "EvenReward" in facts["rewards"] or "even" in facts["rewards"]
