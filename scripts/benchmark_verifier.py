#!/usr/bin/env python
"""Measure how many completions the math verifier grades per second.

    python scripts/benchmark_verifier.py [--data questions.jsonl.gz] [--count 1024] [--workers 2]

Makes one completion for each gold answer of the file (right, wrong, in other forms, without an answer), grades them
twice (the first time includes starting the workers), and prints one JSON line for each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time

from lit_grpo.data import JsonlPrompts
from lit_grpo.rewards.math.verify import MathReward

FORMS = (
    "We add the numbers and get {gold}.\n#### {gold}",
    r"So the total is $\boxed{{{gold}}}$.",
    "The answer is {gold}.",
    r"Let x be the number. Then $x = \boxed{{\frac{{\sqrt{{4}} \cdot {gold}}}{{2}}}}$.",
    "First there are 3 of them, then 17 more, so she has {wrong} left.",
    r"I think it is \boxed{{{wrong}}}, but I am not sure.",
    "I cannot find the answer.",
    "The numbers are 12, 15 and {gold}. Next we multiply them and",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="../shared/data/gsm8k_test.jsonl.gz", help="JSONL with golds in 'answer'")
    parser.add_argument("--count", type=int, default=1024, help="completions")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds for one answer")
    options = parser.parse_args()
    golds = [row.answer or "" for row in JsonlPrompts(options.data).rows()]
    golds = list(itertools.islice(itertools.cycle(golds), options.count))
    reasoning = "Natalia sold 48 / 2 = 24 clips in May. Altogether she sold 48 + 24 = 72 clips. " * 10
    texts = [
        reasoning + FORMS[i % len(FORMS)].format(gold=gold, wrong=f"{i % 90 + 10}.5") for i, gold in enumerate(golds)
    ]
    reward = MathReward(limit=options.limit, workers=options.workers)
    for run in ("cold", "warm"):
        start = time.perf_counter()
        verdicts = reward.verify(golds, texts)
        seconds = time.perf_counter() - start
        print(
            json.dumps(
                {
                    "run": run,
                    "completions": len(verdicts),
                    "seconds": round(seconds, 3),
                    "per_second": round(len(verdicts) / seconds),
                    "correct": sum(v.correct for v in verdicts),
                    "in_workers": sum(v.seconds > 0 for v in verdicts),
                    "timed_out": sum(v.timed_out for v in verdicts),
                    "workers": options.workers,
                }
            )
        )
    reward.close()


if __name__ == "__main__":
    main()
