"""What is known before the first update: against plain loops over single completions."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_grpo.errors import UserError
from lit_grpo.learner.batch import make_experience
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.policy import PolicyConfig
from lit_grpo.rewards import ExactMatch
from lit_grpo.types import Sampling
from tests import tiny
from tests.learner.helpers import fit, rollout


def prepared(batch: Any, needed: set[str], **changes: Any) -> tuple[Any, Any]:
    module = tiny.module(**changes)
    module.configure_model()
    assert module.policy is not None
    torch.manual_seed(0)
    for parameter in module.policy.parameters():  # away from the flat start
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    experience = make_experience(batch, "cpu")
    results = module.forward_runner.old_forward(batch, experience, frozenset(needed))
    return module, results.added_to(experience)


def distributions(module: Any, batch: Any, i: int) -> torch.Tensor:
    """[n_i, V] log-probabilities at the batch's temperature, by the model's own forward on one completion."""
    prompt, completion = batch.prompts[i // batch.group_size].token_ids, batch.completions[i].token_ids
    logits = module.policy.model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0]
    logp: torch.Tensor = (logits[len(prompt) - 1 : len(prompt) - 1 + len(completion)] / batch.temperature).log_softmax(
        1
    )
    return logp


@pytest.mark.parametrize("share", [True, False])
def test_probabilities_entropy_and_squares_before_the_update(share):
    batch = rollout(temperature=0.7, lengths=[3, 0, 5, 2, 4, 4, 1, 6])
    policy = PolicyConfig(tiny=tiny.TINY, share_prompts=share)
    needed = {"old_logprobs", "entropy", "sum_squared_probs"}
    module, found = prepared(batch, needed, policy=policy, micro_batch_size=3)
    for i, completion in enumerate(batch.completions):
        n = len(completion.token_ids)
        if not n:
            continue
        logp = distributions(module, batch, i).detach()
        own = logp[range(n), list(completion.token_ids)]
        torch.testing.assert_close(found.old_logprobs[i, :n], own, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.sum_squared_probs[i, :n], logp.exp().square().sum(1), rtol=1e-4, atol=1e-5)
        plain = (logp * batch.temperature).log_softmax(1)  # the entropy is that of temperature 1
        torch.testing.assert_close(found.entropy[i, :n], -(plain.exp() * plain).sum(1), rtol=1e-4, atol=1e-5)


def test_score_norms_are_those_of_the_gradient_of_each_completion():
    batch = rollout(temperature=1.3, lengths=[3, 0, 5, 2, 4, 4, 1, 6])
    module, found = prepared(batch, {"score_sqnorm"})
    assert all(p.grad is None for p in module.policy.parameters()), "nothing is left behind for the update"
    for i, completion in enumerate(batch.completions):
        module.policy.zero_grad()
        n = len(completion.token_ids)
        if n:
            distributions(module, batch, i)[range(n), list(completion.token_ids)].sum().backward()
        expected = sum(float(p.grad.square().sum()) for p in module.policy.parameters() if p.grad is not None)
        assert float(found.score_sqnorm[i]) == pytest.approx(expected, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("weights", ["given", "logit", "token_level"])
def test_bstar_trains_with_every_choice_of_weights(weights):
    objective = ObjectiveConfig(recipe="reinforce_bstar", optimal_baseline_weights=weights)
    module, watch = fit(1, objective=objective)
    assert module.optimizer_steps == 1
    _, other_watch = fit(1, objective=ObjectiveConfig(recipe="reinforce_bstar"))
    assert watch.metrics[0]["policy/advantage_abs"] != other_watch.metrics[0]["policy/advantage_abs"]


def test_entropy_as_the_only_reward_raises_no_entropy():
    """RENT is paid for low entropy, whatever the given rewards say."""
    objective = ObjectiveConfig(recipe="rent", kl_coef=0.0)
    wrong = [rollout(seed=0, rewards=[0.0] * 8) for _ in range(3)]
    module, watch = fit(batches=wrong, objective=objective)
    assert module.optimizer_steps == 3
    assert watch.metrics[2]["policy/entropy_sequence"] < watch.metrics[0]["policy/entropy_sequence"]


def test_top_entropy_silences_the_other_tokens():
    few, _ = fit(1, objective=ObjectiveConfig(recipe="dapo", top_entropy=0.2), updates_per_rollout=1)
    every, _ = fit(1, objective=ObjectiveConfig(recipe="dapo"))
    assert few.optimizer_steps == 1
    assert not torch.equal(tiny.weights(few), tiny.weights(every))


def test_lopti_takes_its_second_pass_with_the_weights_of_the_first():
    class WeightsOfPasses(tiny.pl.Callback):
        def __init__(self) -> None:
            self.weights: list[torch.Tensor] = []

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.weights.append(tiny.weights(pl_module))

    passes = WeightsOfPasses()
    # Every token of a new model has a probability near 1/14, so 0.07 parts them.
    objective = ObjectiveConfig(recipe="lopti", lopti_eta=0.07, kl_coef=0.0)
    module, watch = fit(1, objective=objective, callbacks=[passes])
    assert module.optimizer_steps == 2
    assert not torch.equal(*passes.weights)
    assert watch.metrics[0]["policy/ratio_gap"] > 1e-4, "old log-probabilities are those before the first pass"


def test_dcpo_keeps_the_history_of_each_prompt():
    module, _ = fit(batches=[rollout(seed=0), rollout(seed=0)], objective=ObjectiveConfig(recipe="dcpo"))
    assert {name: history.visits for name, history in module.objective_state.prompts.items()} == {"p0": 2, "p1": 2}


def test_trpo_adapts_its_penalty_to_the_measured_kl():
    def beta(target: float) -> float:
        objective = ObjectiveConfig(recipe="trpo_penalty", trpo_target_kl=target)
        module, watch = fit(1, objective=objective, updates_per_rollout=2)
        assert watch.metrics[0]["policy/kl_beta"] == 1.0
        return float(module.objective_state.beta)

    assert beta(1e-9) == 2.0
    assert beta(1e3) == 0.5
    adaptive = ObjectiveConfig(recipe="trpo_penalty", trpo_target_kl=0.1)
    with pytest.raises(UserError, match="single update"):
        fit(1, objective=adaptive)


class TestCompletionsWithoutAnAnswer:
    objective = ObjectiveConfig(recipe="rent", invalid_entropy=7.0)

    def test_a_fallback_that_nothing_can_tell_is_refused(self):
        with pytest.raises(UserError, match="no reward tells which completions have no parsable answer"):
            tiny.trainer().fit(tiny.module(objective=self.objective), datamodule=tiny.data())
        with pytest.raises(UserError, match="no parsable answer"):
            fit(1, objective=self.objective)

    def test_they_count_as_unsure(self):
        """RENT's reward is minus the entropy, and of those without an answer minus the fallback."""
        watch = tiny.Recorder()
        kept: list[Any] = []

        class Keep(pl.Callback):
            def on_train_batch_end(
                self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                kept.append((batch, pl_module.step_result.snapshot.experience))

        # Half of the digits: with any digit one seed in eight gives sixteen completions that all have one.
        rewards = [ExactMatch(pattern="[0-4]"), tiny.EvenReward(weight=0.0)]
        data = tiny.data(rewards=rewards, rollouts=1, sampling=Sampling(max_new_tokens=2))
        tiny.trainer(callbacks=[watch, Keep()]).fit(tiny.module(objective=self.objective), datamodule=data)
        batch, experience = kept[0]
        without = [not any(letter in "01234" for letter in text) for text in batch.texts]
        assert 0 < sum(without) < len(without)
        assert batch.no_answer.tolist() == without == experience.invalid.tolist()
        assert watch.metrics[0]["completions/no_answer_frac"] == pytest.approx(sum(without) / len(without))


class TestInitialEntropy:
    def run(self, tmp_path: Any, rollouts: int, resume: bool = False) -> tuple[Any, list[int]]:
        from lit_grpo.callbacks import RolloutCheckpoint

        module = tiny.module(objective=ObjectiveConfig(recipe="gtpo"))
        data: Any = tiny.data(rollouts=rollouts)
        calls: list[int] = []
        make = data.initial_completions

        def counted(n: int) -> Any:
            assert module.policy_version == 0
            calls.append(n)
            self.batch = make(n)
            return self.batch

        data.initial_completions = counted
        checkpoint = RolloutCheckpoint(dirpath=str(tmp_path))
        trainer = tiny.trainer(callbacks=[checkpoint], enable_checkpointing=True)
        trainer.fit(module, datamodule=data, ckpt_path=tmp_path / "last.ckpt" if resume else None)
        return module, calls

    def test_is_measured_once_and_is_that_of_the_untouched_model(self, tmp_path):
        module, calls = self.run(tmp_path, 1)
        assert calls == [100]
        untouched = tiny.module()
        untouched.configure_model()
        means = []
        for i, completion in enumerate(self.batch.completions):
            if completion.token_ids:
                logp = distributions(untouched, self.batch, i).detach()
                means.append(float(-(logp.exp() * logp).sum(1).mean()))
            else:
                means.append(0.0)
        assert module.objective_state.initial_entropy == pytest.approx(sum(means) / len(means), rel=1e-4)
        resumed, calls = self.run(tmp_path, 2, resume=True)
        assert calls == []
        assert resumed.objective_state == module.objective_state

    def test_without_a_data_module_it_must_be_given(self):
        with pytest.raises(UserError, match="initial_entropy"):
            fit(1, objective=ObjectiveConfig(recipe="gtpo"))
        module, _ = fit(1, objective=ObjectiveConfig(recipe="gtpo", initial_entropy=0.5))
        assert module.objective_state.initial_entropy == 0.5


class Switch(tiny.pl.Callback):
    """Changes the objective after the first rollout."""

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def on_train_batch_end(self, trainer: Any, pl_module: Any, out: Any, batch: Any, index: int) -> None:
        if pl_module.policy_version == 1:
            pl_module.change_objective(self.changes)


class TestEntropyFilterInMidRun:
    """The remedy of an exploding entropy, which used to end the run that it was to save."""

    def test_it_compares_with_the_first_rollout(self, caplog: pytest.LogCaptureFixture):
        with caplog.at_level("INFO"):
            module, watch = fit(3, callbacks=[Switch(entropy_filter="all", entropy_gamma=0.1)])
        first = watch.metrics[0]["policy/entropy_sequence"]
        assert module.objective_state.initial_entropy == first
        assert "policy/entropy_initial" not in watch.metrics[0]
        assert watch.metrics[1]["policy/entropy_initial"] == first
        assert "over the completions of the first rollout" in caplog.text
        assert module.objective.name == "grpo+entropy_signal=on"

    def test_the_first_rollout_is_in_the_checkpoint(self):
        module, watch = fit(2)
        checkpoint: dict[str, Any] = {}
        module.on_save_checkpoint(checkpoint)
        resumed = tiny.module()
        resumed.on_load_checkpoint(checkpoint)
        resumed.change_objective({"recipe": "gtpo"})
        assert resumed.objective_state.initial_entropy == watch.metrics[0]["policy/entropy_sequence"]

    def test_a_run_that_is_resumed_under_another_objective_compares_with_it_too(self, tmp_path):
        """It used to measure the trained model, and to call it untouched."""
        from lit_grpo.callbacks import RolloutCheckpoint

        def run(recipe: Any, rollouts: int, **resume: Any) -> tuple[Any, tiny.Recorder]:
            module, recorder = tiny.module(objective=ObjectiveConfig(recipe=recipe)), tiny.Recorder()
            checkpoint = RolloutCheckpoint(dirpath=str(tmp_path), accept_changes="model.objective")
            trainer = tiny.trainer(callbacks=[checkpoint, recorder], enable_checkpointing=True)
            trainer.fit(module, datamodule=tiny.data(rollouts=rollouts), **resume)
            return module, recorder

        _, first = run("grpo", 1)
        module, then = run("gtpo", 2, ckpt_path=tmp_path / "last.ckpt")
        assert len(then.metrics) == 1
        assert module.objective_state.initial_entropy == first.metrics[0]["policy/entropy_sequence"]

    def test_without_a_measured_first_rollout_the_change_is_refused_and_the_run_as_it_was(self):
        module, _ = fit(1)
        module.objective_state = module.objective.new_state()
        before = module.objective
        with pytest.raises(UserError, match="the first rollout measured none"):
            module.change_objective({"recipe": "gtpo"})
        assert module.objective is before
        for given in ({"initial_entropy": 0.4}, {"entropy_gate": float("inf")}):
            module.change_objective({"recipe": "gtpo", **given})
            assert module.objective.name == "gtpo"
