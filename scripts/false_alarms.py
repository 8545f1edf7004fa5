#!/usr/bin/env python
"""Count the false alarms of every monitor and rule in healthy runs that are made of noise alone.

    python scripts/false_alarms.py --runs 10 --rollouts 300
    python scripts/false_alarms.py --write docs/monitors.md     # puts the table between its marks
    python scripts/false_alarms.py --entropy-coef -0.01         # of an objective with an entropy term

A run is drawn, not trained. A policy that does not change, or gets slowly better, answers prompts of a difficulty of
their own; from the single completions come the metrics that the learner would log. So the noise of each metric is that
of its batch: 1 x 8, 8 x 8 and 64 x 8 completions. Rewards are 0 or 1, or 10 for a right answer and 10 for its form, as
in the GTPO paper. Every tenth rollout a held-out set of 100 questions is evaluated with the same policy.

Everything that is found is a false alarm, but for two findings that are true of such runs: that a batch is small, and
that a policy which does not change does not get better.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from lit_grpo.callbacks import monitors  # noqa: E402
from lit_grpo.callbacks.monitors.facts import Facts  # noqa: E402
from lit_grpo.learner.rollout_metrics import reward_length_correlation  # noqa: E402

GROUP = 8
BATCHES = (1, 8, 64)
"""Prompts a rollout."""
SCALES = ("0/1", "0..20")
TRENDS = ("stationary", "learning")
TRUE_OF_NOISE = ("small_batch",)
"""Findings that are right about a small batch."""
TRUE_OF_STANDSTILL = ("reward_flat",)
"""Findings that are right about a policy that does not change."""
TOO_SMALL_TO_HAVE_A_GRADIENT = ("zero_gradient", "solved", "all_wrong")
"""Findings that are right about rollouts of one prompt."""
MARKS = ("<!-- false alarms: scripts/false_alarms.py -->", "<!-- end of false alarms -->")


def healthy(prompts: int, scale: str, trend: str, rollouts: int, seed: int) -> Iterator[dict[str, float]]:
    """Draw what a healthy run logs, rollout by rollout."""
    draw = np.random.default_rng([seed, prompts, SCALES.index(scale), TRENDS.index(trend)])
    questions = draw.beta(1.2, 0.8, 100)
    held: dict[str, float] = {}
    count, unit = prompts * GROUP, 1.0 if scale == "0/1" else 20.0
    for step in range(1, rollouts + 1):
        done = step / rollouts if trend == "learning" else 0.0

        def noisy(value: float, sd: float, n: int = count) -> float:
            """Mean of n numbers that scatter by a share ``sd`` of their value."""
            return float(value * (1 + draw.normal(0, sd) / math.sqrt(n)))

        skill = draw.beta(1.2, 0.8, prompts)[:, None] ** (1 - 0.5 * done)
        right = draw.random((prompts, GROUP)) < skill
        form = (draw.random((prompts, GROUP)) < 0.95 + 0.04 * done) | right
        reward = right.astype(float) if scale == "0/1" else 10.0 * right + 10.0 * form
        length = draw.lognormal(4.6 + 0.2 * done, 0.5, (prompts, GROUP))
        uniform = np.ptp(reward, axis=1) == 0
        total, sets = reward_length_correlation(
            reward.ravel().tolist(), length.ravel().tolist(), right.ravel().tolist(), GROUP
        )
        cut = draw.random((prompts, GROUP)) < 0.02
        entropy = 0.4 - 0.1 * done
        out = {
            "reward": float(reward.mean()),
            "reward/std": float(reward.std()),
            "reward/math": float(right.mean()) * (1 if scale == "0/1" else 10),
            "groups/zero_std_frac": float(uniform.mean()),
            "groups/zero_advantage_frac": float(uniform.mean()),
            "groups/all_correct_frac": float(right.all(1).mean()),
            "groups/all_wrong_frac": float((~right).all(1).mean()),
            "groups/count": float(prompts),
            "groups/distinct_frac": noisy(0.9, 0.2),
            **({"groups/reward_length_corr": total / sets} if sets else {}),
            "groups/equal_pairs": float(draw.poisson(0.5 * prompts)),
            "groups/prefix_pushed_down_frac": float((draw.random(prompts) < 0.45).mean()),
            "completions/length": float(length.mean()),
            "completions/tokens": float(length.sum()),
            "completions/truncated_frac": float(cut.mean()),
            "completions/empty_frac": 0.0,
            "completions/no_answer_frac": float((~form).mean()),
            "completions/repetition_frac": abs(noisy(0.05, 1.0)),
            "completions/longest_run_frac": abs(noisy(0.05, 1.0)),
            "completions/top_token_frac": abs(noisy(0.12, 0.5)),
            "policy/entropy": noisy(entropy, 0.5),
            "policy/entropy_sequence": noisy(entropy, 0.5),
            "policy/conflict_frac": noisy(0.2, 0.5),
            "policy/ratio_gap": noisy(0.02, 1.0),
            "policy/approx_kl_k3": abs(noisy(0.002, 1.0)),
            "policy/kl_ref_k3": abs(noisy(0.001 * (1 + 50 * done), 1.0)),
            "policy/step_kl": float(draw.lognormal(math.log(4e-4), 0.5)),
            "policy/delta_prob_abs": abs(noisy(0.01, 0.5)),
            "policy/clip_frac/low": abs(noisy(0.01, 1.0)),
            "policy/clip_frac/high": abs(noisy(0.01, 1.0)),
            "policy/upward_frac": noisy(0.5, 0.3),
            "policy/advantage_abs": noisy(0.6, 0.3),
            "policy/advantage_abs_max": 2.5,
            "optim/grad_norm": float(draw.lognormal(0.0, 0.3 + 0.5 / math.sqrt(prompts))),
            "critic/grad_norm": float(draw.lognormal(0.5, 0.3)),
            "optim/update_to_weight_ratio": float(draw.lognormal(-7.0, 0.1)),
            "optim/update_cosine": float(np.clip(draw.normal(0.1, 0.1), -1, 1)),
            "optim/steps": 4.0 * step,
            "optim/skipped_steps": 0.0,
            "loss": float(draw.normal(0, 0.01)),
            "rollout/staleness": 0.0,
            "sanity/reward_contradiction_frac": 0.0,
            "sanity/advantage_contradiction_frac": 0.0,
            "sanity/inverted_advantage_frac": 0.0,
            "sanity/mixed_prompts_frac": 0.0,
            "sanity/missing_tokens_frac": 0.0,
            "sampler_mismatch/logprob_abs_diff": float(draw.lognormal(-4.6, 0.15)),
            # The largest of some ten thousand gaps: long completions have single tokens that nearly contradict.
            "sampler_mismatch/prob_abs_diff_max": float(draw.beta(6, 2)),
            "sampler_mismatch/weight": float(1 + draw.normal(0, 0.002)),
            "sampler_mismatch/weight_sq": 1.005,
            "sampler_mismatch/ess": 0.995,
            "sampler_mismatch/chi2_token": 0.005,
            "sampler_mismatch/kl_k1": float(draw.normal(0, 5e-4)),
            "sampler_mismatch/kl_k3": abs(float(draw.normal(5e-4, 2e-4))),
            "sampler_mismatch/learner_perplexity": 1.5,
            "sampler_mismatch/sampler_perplexity": float(1.5 * (1 + draw.normal(0, 0.002))),
            "sampler_mismatch/impossible_frac": 0.0,
            "critic/value_correct": noisy(0.7, 0.4) * unit,
            "critic/value_incorrect": noisy(0.4, 0.4) * unit,
            "critic/value_outside_frac": abs(noisy(0.03, 1.0)),
            "critic/explained_variance": float(draw.normal(0.4, 0.4 / math.sqrt(prompts))),
            "time/tokens_per_second": float(draw.lognormal(7.6, 0.15)),
            "time/generate": float(draw.lognormal(1.1, 0.15)),
            "time/update": float(draw.lognormal(0.7, 0.15)),
            "memory/peak_gib": 10.0,
            "reward_errors/timeout_frac/math": float((draw.random(count) < 0.01).mean()),
        }
        if scale != "0/1":
            out["reward/format"] = 10 * float(form.mean())
        for name, of in (("correct", right), ("incorrect", ~right)):
            if of.any():
                out[f"completions/{name}_length"] = float(length[of].mean())
        if step % 10 == 1:
            solved = draw.random(100) < questions ** (1 - 0.5 * done)
            formed = (draw.random(100) < 0.95 + 0.04 * done) | solved
            answers = solved.astype(float) if scale == "0/1" else 10.0 * solved + 10.0 * formed
            held = {
                "val/reward": float(answers.mean()),
                "val/pass@1": float(solved.mean()),
                "val/held_out/reward": float(answers.mean()),
                "val/held_out/reward/se": float(answers.std(ddof=1) / 10),
            }
        yield out | held


def count(
    prompts: int, scale: str, trend: str, runs: int, rollouts: int, entropy_coef: float = 0.0
) -> Counter[tuple[str, str]]:
    """Count findings of each (kind, severity) in healthy runs, all monitors with their defaults.

    Without an ``entropy_coef`` the monitors know nothing of an objective, as in a project of somebody else.
    """
    found: Counter[tuple[str, str]] = Counter()
    for seed in range(runs):
        crew = monitors.all_monitors()
        if entropy_coef:
            for monitor in crew:
                monitor.facts = Facts(entropy_coef=entropy_coef)
        for step, metrics in enumerate(healthy(prompts, scale, trend, rollouts, seed), 1):
            for monitor in crew:
                found.update((f.kind, f.severity) for f in monitor.observe(step, metrics))
    return found


def is_false(kind: str, prompts: int, trend: str) -> bool:
    """Tell whether a finding of this kind is untrue of a run of noise."""
    if trend == "stationary" and kind in TRUE_OF_STANDSTILL:
        return False
    return kind not in TRUE_OF_NOISE and not (prompts == 1 and kind in TOO_SMALL_TO_HAVE_A_GRADIENT)


def table(runs: int, rollouts: int, entropy_coef: float = 0.0) -> str:
    """Make the table: false alarms per 1,000 rollouts by kind and severity, one column for each batch and scale."""
    columns = [(prompts, scale) for scale in SCALES for prompts in BATCHES]
    by_trend = {(c, trend): count(*c, trend, runs, rollouts, entropy_coef) for c in columns for trend in TRENDS}
    counts = {c: sum((by_trend[c, trend] for trend in TRENDS), Counter()) for c in columns}
    every = len(TRENDS) * runs * rollouts / 1000
    kinds = sorted(
        {kind.name for name in monitors.__all__ for kind in getattr(monitors, name).findings}
        | {r.name for r in monitors.RULES}
    )
    severities = ("info", "warning", "critical")
    head = [
        "| finding | " + " | ".join(f"{p} x {GROUP}, {s}" for p, s in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]

    def row(title: str, numbers: list[float]) -> str:
        return f"| {title} | " + " | ".join("0" if n == 0 else f"{n:.2f}" for n in numbers) + " |"

    def untrue(severity: str, c: tuple[int, str]) -> float:
        pairs = [(trend, k, n) for trend in TRENDS for (k, s), n in by_trend[c, trend].items() if s == severity]
        return sum(n for trend, k, n in pairs if is_false(k, c[0], trend))

    rows, silent = [], []
    for kind in kinds:
        said = [s for s in severities if any(counts[c][kind, s] for c in columns)]
        if not said:
            silent.append(f"`{kind}`")
        rows += [row(f"`{kind}` ({s})", [counts[c][kind, s] / every for c in columns]) for s in said]
    for severity in ("warning", "critical"):
        sums = [untrue(severity, c) for c in columns]
        rows.append(row(f"**all untrue: {severity}**", [n / every for n in sums]))
    return "\n".join([*head, *rows, "", f"Never: {', '.join(silent)}."])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="of each trend, batch and scale")
    parser.add_argument("--rollouts", type=int, default=300, help="length of a run")
    parser.add_argument("--entropy-coef", type=float, default=0.0, help="tell the monitors of this term in the loss")
    parser.add_argument("--write", type=Path, help="document whose table between the marks is replaced")
    args = parser.parse_args(argv)
    text = table(args.runs, args.rollouts, args.entropy_coef)
    if args.write is None:
        print(text)
        return 0
    old = args.write.read_text(encoding="utf-8")
    start, end = old.index(MARKS[0]) + len(MARKS[0]), old.index(MARKS[1])
    args.write.write_text(f"{old[:start]}\n\n{text}\n\n{old[end:]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
