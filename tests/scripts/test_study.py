"""The study of the sources' claims: calculations, configurations, verdicts, and the page that is made of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_grpo.cli.training import read_configuration
from lit_grpo.engines.base import EngineContext, RolloutEngine
from lit_grpo.engines.transformers.engine import TransformersEngine
from lit_grpo.errors import UserError
from lit_grpo.objectives import Objective
from lit_grpo.policy import PolicyConfig
from lit_grpo.policy.forward.policy import Policy
from lit_grpo.policy.model.load import load_model, load_tokenizer
from lit_grpo.types import Request, Sampling
from scripts import study
from scripts.study_cases import measures as m
from scripts.study_cases.claims import CLAIMS, find, remarks
from scripts.study_cases.exact import EXACT, SEEDS, TOY
from scripts.study_cases.page import (
    MOST_BYTES,
    RECORDED,
    collect,
    judge,
    minutes_of,
    page,
    read,
    runs_of,
    runs_with_twins,
    write,
)
from scripts.study_cases.quantised import QuantisedEngine, rounded
from scripts.study_cases.results import NOT_RUN, NOT_SUPPORTED, SUPPORTED, UNTESTED, PartResult, above, below, seeds_for
from scripts.study_cases.runs import CONFIGS, files_of, settings_of
from scripts.warm_start_two_form_addition import warm_start

DOCS = study.ROOT / "docs"
ARMS = sorted({arm for claim in CLAIMS for arm in claim.arms})


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return read(DOCS / RECORDED)


# ------------------------------------------------------------------------------------------------ calculations


@pytest.mark.parametrize("name", EXACT)
def test_calculations_come_out_as_recorded(name: str, recorded: dict[str, Any]):
    found = EXACT[name]()
    assert [part.says for part in found] == [part["says"] for part in recorded["exact"][name]]
    assert [part.holds for part in found] == [part.holds for part in judge(find(name), recorded)[1]]


@pytest.mark.parametrize("seed", SEEDS)
def test_sequence_mean_likelihood_is_the_gradient_of_the_inverse_length(seed: int):
    """All completions right or wrong: PL descends -E[1/|a|], NL E[1/|a|], and a constant divisor nothing at all."""
    logits = TOY.logits(seed)
    share = TOY.logprobs(logits).sum(1).exp()
    assert float(share.sum().detach()) == pytest.approx(1)
    (share / TOY.lengths).sum().backward()
    assert logits.grad is not None
    assert float((TOY.gradient("pl", logits) + logits.grad).norm()) < 1e-12
    assert float((TOY.gradient("nl", logits) - logits.grad).norm()) < 1e-12
    assert float(logits.grad.norm()) > 1e-3
    for recipe in ("tnpl", "tnnl"):
        assert float(TOY.gradient(recipe, logits).norm()) < 1e-12


def test_every_claim_without_runs_has_a_calculation_or_a_reason():
    assert {claim.name for claim in CLAIMS if claim.exact} == set(EXACT)
    assert all(claim.exact or bool(claim.arms) != bool(claim.untestable) for claim in CLAIMS)
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    assert all(len(claim.seeds) >= 3 for claim in CLAIMS if claim.arms)


# ------------------------------------------------------------------------------------------------ configurations


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_resolves(arm: str):
    task, over = files_of(arm)
    read_configuration("fit", ["--config", str(task), "--config", str(over)])
    settings = settings_of(arm)
    objective = dict(settings["model"]["objective"])
    made = Objective.from_recipe(objective.pop("recipe"), **objective)
    assert settings["monitors"] is False
    updates = settings["model"].get("updates_per_rollout", 1)
    assert updates == (4 if "/off_" in arm or task.stem.endswith(("_off", "_quarter")) else 1)
    if updates > 1:
        assert (made.ratio == "self") == arm.endswith("_plain")


def test_no_configuration_is_without_a_claim():
    files = {f"{path.parent.name}/{path.stem}" for path in CONFIGS.glob("*/*.yaml")}
    assert files == set(ARMS)


# ------------------------------------------------------------------------------------------------ measures


def run_of(rewards: Sequence[float], arm: str = "two_form/grpo", seed: int = 0, **curves: Sequence[float]) -> m.Run:
    columns = {"reward": list(rewards), **{key.replace("__", "/"): list(row) for key, row in curves.items()}}
    return {"arm": arm, "seed": seed, "curves": columns, "alarms": [], "status": "done", "settings": {}, "seconds": 1.0}


def test_a_collapse_is_the_loss_of_a_fifth():
    assert m.lost_at(run_of([0.8] * 40)) is None
    assert m.collapse(run_of([0.8] * 40)) == 41
    fell = m.lost_at(run_of([0.8] * 20 + [0.0] * 20))
    # After two rollouts at 0, eight of the last ten are at 0.8: four fifths, less by rounding.
    assert fell == 22


def test_where_questions_move_the_reward_a_collapse_is_one_beside_a_healthy_run_too():
    hard = [0.8] * 20 + [0.3] * 20
    assert m.lost_at(run_of(hard)) == 24
    assert m.lost_at(run_of(hard) | {"twin": hard}) is None
    # A run that only learns more slowly than its twin has lost nothing.
    assert m.lost_at(run_of([0.4] * 40) | {"twin": [0.8] * 40}) is None
    assert m.lost_at(run_of([0.8] * 20 + [0.0] * 20) | {"twin": [0.8] * 20 + [0.7] * 20}) is not None


def test_runs_of_countdown_have_the_healthy_run_of_their_seed_beside_them():
    healthy, other = run_of([0.7] * 9, "countdown/grpo", 1), run_of([0.1] * 9, "countdown_fast/nl", 1)
    elsewhere = run_of([0.1] * 9, "two_form/nl", 1)
    found = runs_with_twins(collect([healthy, other, elsewhere], {}))
    assert found["countdown_fast/nl", 1]["twin"] == [0.7] * 9
    assert "twin" not in found["two_form/nl", 1]
    assert set(runs_with_twins(collect([other, elsewhere], {}))) == {("two_form/nl", 1)}
    assert ("countdown/grpo", 0) in study.jobs_of([find("countdown_nl")])


def test_measures():
    run = run_of([0.5] * 20, policy__entropy=[0.2] * 3 + [0.6] * 7 + [0.1] * 10)
    assert m.change("policy/entropy")(run) == pytest.approx(-0.1)
    assert m.rise("policy/entropy")(run) == pytest.approx(0.4)
    assert m.until(12, "policy/entropy")(run) == pytest.approx((0.2 + 0.6 * 7 + 0.1 * 2) / 10)
    assert m.reached(0.5)(run) == 5
    assert m.reached(0.6)(run) == 21
    # Where a rollout has no positive completions, the negative ones alone count.
    moved = run_of([0.5] * 12, a=[0.0, -1.0] + [-3.0] * 5 + [0.0] * 5, b=[1.0] * 7 + [None] * 5)  # type: ignore[list-item]
    assert m.peak("a", "b")(moved) == pytest.approx(2.0)
    evaluated = run_of([0.5] * 5, val__pass=[None, 0.2, None, 0.4, 0.6])  # type: ignore[list-item]
    assert m.last("val/pass", 2)(evaluated) == pytest.approx(0.5)
    # What dynamic sampling drops counts for the reward.
    assert m.end("reward")(run_of([0.5] * 20, sampling__reward=[0.9] * 20)) == pytest.approx(0.9)


def test_a_measure_since_the_best_reward_needs_a_collapse():
    # A fifth is lost at rollout 22; until rollout 20 the reward is at its best, which it first is at rollout 1.
    fell = run_of([0.8] * 20 + [0.0] * 20, policy__entropy=[0.1] * 15 + [0.3] * 25)
    assert m.since_best("policy/entropy")(fell) == pytest.approx(0.2)
    assert m.since_best("policy/entropy", ratio=True)(fell) == pytest.approx(3.0)
    assert math.isnan(m.since_best("policy/entropy")(run_of([0.8] * 40, policy__entropy=[0.1] * 40)))
    # The KL from the reference is 0 at the first rollout.
    from_zero = run_of([0.8] * 20 + [0.0] * 20, policy__kl=[0.0] * 10 + [1.0] * 30)
    assert m.since_best("policy/kl", ratio=True)(from_zero) == math.inf


@pytest.mark.parametrize(
    ("values", "holds"),
    [((1.0, 1.1, 0.9), True), ((1.0, 1.1, -0.1), False), ((0.01, 0.02, 9.0), False), ((1.0,), True)],
)
def test_a_part_holds_if_all_seeds_agree_and_the_mean_is_beyond_the_noise(values: tuple[float, ...], holds: bool):
    assert above("", values).holds is holds
    assert below("", [-value for value in values]).holds is holds


def test_exact_values_need_no_standard_error():
    assert above("", (0.01, 0.02, 9.0), drawn=False).holds


def test_seeds_for_a_claim_are_those_for_which_every_part_is_so():
    parts = [above("", (1.0, 1.0, -1.0)), below("", (-1.0, 1.0, -1.0)), above("", (5.0,))]
    assert seeds_for(parts) == (1, 3)
    assert seeds_for([above("", (0.01, 0.02, 9.0))]) == (3, 3)  # though the spread is too wide for support
    assert seeds_for([above("", (-5.0,)), above("", (1.0, 1.0))]) == (0, 2)


# ------------------------------------------------------------------------------------------------ verdicts


def records(final: Callable[[str, int], float], arms: Sequence[str]) -> dict[str, Any]:
    return collect([run_of([final(arm, seed)] * 30, arm, seed) for arm in arms for seed in (0, 1, 2)], {})


def test_verdicts():
    claim = find("gspo_many_updates")
    better = records(lambda arm, seed: 0.6 + 0.01 * seed + 0.2 * ("gspo" in arm), claim.arms)
    assert judge(claim, better)[0] == SUPPORTED
    worse = records(lambda arm, seed: 0.6 + 0.01 * seed - 0.2 * ("gspo" in arm), claim.arms)
    verdict, parts = judge(claim, worse)
    assert verdict == NOT_SUPPORTED
    assert parts[0].values == pytest.approx((-0.2, -0.2, -0.2))
    assert "**not supported here**" in page(worse)
    one_missing = {**better, "runs": better["runs"][1:]}
    assert judge(claim, one_missing) == (NOT_RUN, [])
    steady = collect([run_of([0.7] * 30, "two_form_fast/grpo_kl", seed, policy__entropy=[0.1] * 30,
                             policy__kl_ref_k3=[0.1] * 30) for seed in (0, 1, 2)], {})  # fmt: skip
    # No collapse, no order in time.
    assert judge(find("kl_late_entropy_in_time"), steady)[0] == UNTESTED
    assert "because a run has no collapse to measure" in page(steady)


def test_a_collapse_is_told_with_the_first_monitor_that_saw_it():
    run = run_of([0.8] * 20 + [0.0] * 20)
    run["alarms"] = [[19, "C_NL", "warning"], [30, "C_PL", "critical"]]
    text = page(collect([run], {}))
    assert "| two_form/grpo | 0 | 22 | C_NL at 19 | 3 |" in text


def test_records_are_written_and_read_to_the_same_bytes(tmp_path: Path):
    recorded = collect([run_of([0.5] * 3)], {"x": [PartResult("a", (1.0,))]})
    write(tmp_path / "a", recorded)
    write(tmp_path / "b", read(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_remarks_carry_the_numbers_of_the_runs():
    fell, steady = [0.8] * 20 + [0.0] * 20, [0.8] * 40
    runs = {"a": [run_of(fell), run_of(fell), run_of(steady)], "b": [run_of(steady)] * 3}
    said = remarks.fall_of({"of A": ("a",), "of B": ("b",)}, "so it is.")(runs)
    assert said == "A fifth of the reward is lost by 2 of 3 runs (rollouts 22 to 22) of A, 0 of 3 runs of B: so it is."
    lengths: dict[str, Any] = {
        "completions__correct_length": [9.0] * 3,
        "completions__incorrect_length": [6.0, 6.5, 7.0],
    }
    longer = remarks.longer_when_right("a", "so.")({"a": [run_of([0.5] * 3, **lengths)] * 3})
    assert longer == "In the beginning right completions are longer than wrong ones by 2.5 tokens: so."
    clip: dict[str, Any] = {"policy__clip_frac/low": [0.01] * 3, "policy__clip_frac/high": [0.02] * 3}
    taken = remarks.clipped({"PL": "a"}, "little.")({"a": [run_of([0.5] * 3, **clip)] * 3})
    assert taken == "The clip takes 3 % of the tokens of PL: little."
    lowest = remarks.lowest_at("a", "v", "At")({"a": [run_of([0.5] * 9, v=[5.0, 4, 3, 2, 1, 2, 3, 4, 5])] * 2})
    assert lowest == "At 7, 7."
    assert "so it is" not in page(collect([], {}))


# ------------------------------------------------------------------------------------------------ few bits


def test_a_row_is_rounded_to_evenly_spaced_values():
    weight = torch.tensor([[1.0, 0.2, -0.6], [0.0, 0.0, 0.0], [70.0, 69.0, -7.0]])
    # Of 3 bits: -3 to 3 thirds of the largest of the row.
    expected = torch.tensor([[1.0, 1 / 3, -2 / 3], [0, 0, 0], [70.0, 70.0, 0.0]])
    torch.testing.assert_close(rounded(weight, 3), expected)
    assert len(rounded(torch.linspace(-1, 1, 4000)[None], 4).unique()) == 15


def test_a_sampler_with_few_bits_differs_and_greedy_answers_do_not(tmp_path: Path):
    warm_start(tmp_path, steps=2)
    config = PolicyConfig(path=str(tmp_path), share_prompts=False)
    policy, tokenizer = Policy(load_model(config)), load_tokenizer(config)
    context = EngineContext(policy, config, tokenizer, [tokenizer.eos_token_id], max_model_len=32, seed=0)
    engine = QuantisedEngine.from_context(context, bits=3)
    whole = TransformersEngine.from_context(context)
    requests = [Request(0, tuple(tokenizer("27+15=")["input_ids"]), (1, 2, 3, 4))]
    for sampler in (engine, whole):
        sampler.sync(policy.named_weights(), 4)

    def drawn(sampler: RolloutEngine, temperature: float) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        found = sampler.generate(requests, Sampling(max_new_tokens=8, temperature=temperature))
        rows = sorted(found, key=lambda row: row.sample)
        assert all(row.policy_version == 4 for row in rows)
        return [(row.token_ids, row.logprobs) for row in rows]

    assert drawn(engine, 0.0) == drawn(whole, 0.0)
    assert drawn(engine, 1.0) != drawn(whole, 1.0)
    # The learner's weights stay as they are, and the next sync rounds what they have become.
    assert len(next(w for w in policy.parameters() if w.ndim == 2)[0].unique()) > 7
    assert all(len(row.unique()) <= 7 for row in next(w for w in engine.model.parameters() if w.ndim == 2))
    engine.close()
    with pytest.raises(UserError, match="takes turns"):
        QuantisedEngine.from_context(replace(context, beside_learner=True), bits=3)
    with pytest.raises(ValueError, match="from 2 to 16"):
        QuantisedEngine.from_context(context, bits=1)


# ------------------------------------------------------------------------------------------------ the command


def test_one_claim_is_run_and_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    warm_start(tmp_path / "models/two_form_addition", steps=2)
    out = tmp_path / "runs.jsonl"
    command = ["--claim", "clip_higher_keeps_entropy", "--jobs", "1", "--rollouts", "2"]
    command += ["--out", str(out), "--models", str(tmp_path / "models")]
    assert study.main(command) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted((run["arm"], run["seed"]) for run in found) == [
        (arm, seed) for arm in ("two_form/off_grpo_clip", "two_form/off_grpo_clip_higher") for seed in (0, 1, 2)
    ]
    assert all(run["status"] == "done" and len(run["curves"]["policy/entropy"]) == 2 for run in found)
    assert "clip_higher_keeps_entropy: " in capsys.readouterr().out
    before = out.read_bytes()
    assert study.main(command) == 0
    assert out.read_bytes() == before
    # Another length is another run.
    assert study.recorded_runs(out, [("two_form/off_grpo_clip", 0)], None) == {}
    assert len(study.recorded_runs(out, [("two_form/off_grpo_clip", 0)], 2)) == 1


def test_a_run_that_fails_is_told_and_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "models/two_form_addition").mkdir(parents=True)
    (tmp_path / "models/two_form_addition/config.json").write_text("{}")
    command = ["--claim", "critic_below_zero", "--jobs", "1", "--rollouts", "2", "--out", str(tmp_path / "runs.jsonl")]
    assert study.main([*command, "--models", str(tmp_path / "models")]) == 1
    said = capsys.readouterr()
    assert "critic_below_zero: not run yet" in said.out
    assert "two_form/ppo seed 0: error" in said.err


def test_the_list_says_how_long_claims_take(capsys: pytest.CaptureFixture[str], recorded: dict[str, Any]):
    assert study.main(["--list", "--claim", "cl_delays", "eq9_nl_lengthens"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["cl_delays", "9", "runs", f"{minutes_of(find('cl_delays'), recorded):.1f}", "min",
                               "landscape", "study,", "Fig.", "4", "a,", "b"]  # fmt: skip
    assert "calculated" in rows[1]
    assert " min " not in rows[1]
    assert rows[2].startswith("2 claims, 9 runs; the 9 recorded ones take ")
    assert "not recorded" in study.listing([find("cl_delays")], {"runs": [], "exact": {}})


def test_a_value_that_every_seed_has_stands_alone():
    assert above("x", [0.0, 0.0, 0.0]).found() == "0 (every seed)"
    assert above("x", [1.0, 1.0, 4.0]).found() == "2 ± 1 (1, 1, 4)"
    assert above("x", [0.5]).found() == "0.5"


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_agrees_with_what_is_recorded(recorded: dict[str, Any]):
    assert (DOCS / "study.md").read_text(encoding="utf-8") == page(recorded)


def test_recorded_runs_are_those_of_the_configurations(recorded: dict[str, Any]):
    for run in recorded["runs"]:
        assert run["settings"] == settings_of(run["arm"]), f"{run['arm']} has changed since it was recorded"
        assert run["status"] != "error"


def test_a_claim_takes_less_than_twenty_minutes_and_all_less_than_six_hours_on_two_cores(recorded: dict[str, Any]):
    minutes = {claim.name: took for claim in CLAIMS if (took := minutes_of(claim, recorded)) is not None}
    assert len(minutes) > 40
    assert all(0 < took < 20 for took in minutes.values()), minutes
    assert 0 < sum(run["seconds"] for run in recorded["runs"]) < 2 * 6 * 3600


def test_every_claim_that_ran_has_a_small_figure(recorded: dict[str, Any]):
    drawn = {claim.name for claim in CLAIMS if claim.arms and runs_of(claim, recorded) is not None}
    found = {path.stem: path.stat().st_size for path in (DOCS / "study").glob("*.png")}
    assert set(found) == drawn
    assert all(size < MOST_BYTES for size in found.values())
