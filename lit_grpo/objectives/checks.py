"""Contradictions between the parts of an objective, or with the run, refused with the reason."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from lit_grpo.errors import UserError
from lit_grpo.objectives.part import WHERE, refuse
from lit_grpo.objectives.ratios import WITHOUT_OLD
from lit_grpo.utils.bounds import check_fields

if TYPE_CHECKING:
    from lit_grpo.objectives.objective import Objective


def check_parts(o: Objective) -> None:
    """Refuse parts that contradict each other, whatever the run."""
    w, r = o.token_weights, o.regularizers
    if o.ratio == "none" and o.trust_region.needs_ratio:
        refuse("trust_region", f"the trust region {o.trust_region.kind!r} bounds a ratio, but the ratio is 'none'")
    if (o.ratio == "geometric") != o.trust_region.per_sequence and o.trust_region.kind != "custom":
        refuse("ratio", f"the ratio {o.ratio!r} does not fit the trust region {o.trust_region.kind!r}: "
                "'geometric' goes with gmpo and rspo, and they with it",
                "leave ratio out, or take a recipe whose trust region bounds such a ratio")  # fmt: skip
    if o.trust_region.per_sequence and o.varies_by_token:
        refuse(
            "trust_region",
            f"{o.trust_region.kind!r} has one term per completion; weights or advantages of tokens have no place",
        )
    if w.conflict_overlap != "none" and o.advantage.per_token:
        refuse("conflict_overlap", "conflict masks need one advantage per completion, not one per token")
    if o.aggregation.kind == "conflict_tokens" and w.conflict_overlap == "none":
        refuse("aggregation", "'conflict_tokens' divides by conflict tokens, but conflict_overlap is 'none'")
    if r.value_coef and not o.advantage.critic:
        refuse("value_coef", f"the advantage {o.advantage.kind!r} uses no critic, so there is no critic to train")
    for part in o.parts():
        if dataclasses.is_dataclass(part):
            check_fields(part, WHERE)
        part.check()
    if o.demonstrations:
        _check_demonstrations(o)
    elif o.advantage.kind == "sign":
        _check_sign(o)


def _check_sign(o: Objective) -> None:
    """Refuse what changes the reward's size alone: the advantage asks only which completions are correct."""
    reason = "the advantage 'sign' goes by which completions are correct, so {} would do nothing"
    if o.shaping.entropy_reward:
        refuse("entropy_reward", reason.format("an entropy reward"), "leave one of them out")
    if o.shaping.overlong_penalty:
        refuse("overlong_penalty", reason.format("a length penalty"), "set overlong_penalty: false")
    if o.regularizers.kl_reward:
        refuse("kl_placement", reason.format("a KL term in the reward"), "set kl_placement: loss")


def _check_demonstrations(o: Objective) -> None:
    """Refuse what is about samples or their rewards: completions are the data's solutions."""
    f, r, s = o.filters, o.regularizers, o.shaping
    sampled = "supervised fine-tuning samples nothing"
    rewards = "supervised fine-tuning has no rewards"
    if o.sampler.kind != "none":
        refuse("sampler_correction", f"{sampled}, so there is no mismatch with a sampler to correct")
    if o.ratio not in WITHOUT_OLD:
        refuse("ratio", f"{sampled}, so there is no old policy for a ratio: its loss is the plain likelihood")
    if f.zero_variance:
        key = "dynamic_sampling" if f.dynamic_sampling else "drop_zero_variance"
        refuse(key, f"{sampled}, so there are no groups of samples to drop or to sample again")
    if o.advantage.kind != "sign":
        refuse("advantage", f"{rewards}, so there are no advantages: every solution counts 1")
    if f.keep_sign != "all":
        refuse("keep_sign", f"{rewards} to choose completions by")
    if r.kl_reward:
        refuse("kl_placement", f"{rewards} for a KL term to go into", "set kl_placement: loss")
    if r.nll_coef:
        refuse("nll_coef", "the loss is that already")
    shaped = {
        "label_noise": bool(s.label_noise), "entropy_reward": s.entropy_reward, "overlong_penalty": s.overlong_penalty,
        "truncated_reward": s.truncated_reward != "keep", "reward_map": s.reward_map != "raw",
    }  # fmt: skip
    for key, given in shaped.items():
        if given:
            refuse(key, f"{rewards} to shape")


def check_run(o: Objective, group_size: int, updates: int, has_critic: bool) -> None:
    """Refuse contradictions with the run; arguments as of :meth:`Objective.check`."""
    if group_size < 1 or updates < 1:
        raise UserError(f"group_size {group_size} and updates_per_rollout {updates} must be at least 1")
    alone = group_size == 1
    if o.demonstrations and not alone:
        raise UserError(
            f"{o.name}: a prompt has one solution, and group_size is {group_size}: nothing is sampled",
            where="data.group_size",
            remedy="set data.group_size: 1 (configs/recipes/sft.yaml does)",
        )
    if alone and o.advantage.grouped and o.advantage.single_sample_advantage == "zero":
        refuse(
            "advantage",
            f"{o.name}: the advantage {o.advantage.kind!r} compares the completions of one prompt, and group_size is 1,"
            " so every advantage would be 0",
            "use a group_size of at least 2",
        )
    if alone and o.filters.zero_variance:
        refuse("drop_zero_variance", f"{o.name}: a group of one is always uniform, so everything would be dropped")
    if alone and o.token_weights.conflict_overlap != "none":
        refuse("conflict_overlap", f"{o.name}: a group of one has no conflicts")
    if o.advantage.critic and not has_critic:
        refuse(
            "advantage",
            f"{o.name}: the advantage {o.advantage.kind!r} needs the values of a critic, and the run has none",
            "configure a critic, or use a group advantage such as group_std",
        )
    if has_critic and not o.advantage.critic:
        refuse("advantage", f"{o.name} uses no critic, but the run has one", "remove the critic")
