#!/usr/bin/env python
"""Throw broken and hostile input at the math verifier, the countdown parser and the code sandbox.

    python scripts/fuzz_rewards.py [--count 20000] [--seed 0] [--workers 2]

Inputs are mutations of a corpus (answers of every kind, expressions, programs and attacks): cut, doubled, joined, with
signs and brackets put in. Of all inputs, 70 % go to the verifier, 25 % to countdown, 5 % to the sandbox. Found is:
an exception, a crashed worker, an answer past its limit, a countdown value that exact arithmetic denies, a file
written, a process left over, or a program that passes tests it cannot pass. Prints one JSON line for each part; exit
code 1 if anything was found.
"""

from __future__ import annotations

import argparse
import ast
import json
import operator
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_grpo.rewards import CodeReward, CountdownReward, MathReward
from lit_grpo.types import Completion, Prompt, RewardInput
from tests.rewards.code.code_attacks import ESCAPES, FOOLING, HOLDING_UP, TESTS
from tests.rewards.math.more_verifier_cases import MORE
from tests.rewards.math.verifier_cases import CASES

LIMIT, GRACE = 1.0, 3.0
SIGNS = r"""{ } ( ) [ ] \{ \} $ $$ \( \) \[ \] ^ _ = < > , ; : . | % & \\ \frac \sqrt \boxed{ \text{ \left( \right) \pm
\cup \sum_{k=1}^{ \int_0^1 \begin{pmatrix} \end{pmatrix} ^{^{ 9^{9^{9 !!! \infty \pi e^{i 1/0 ½ ３ − 答案 #### **
or and answer is <answer> </answer> Question: \u0000 \ud800 0x1 1e999 nan inf""".split()  # noqa: SIM905
CODE = ["\n", "    ", "return", "lambda: ", "while True: pass", "def add(a, b):", "(", ")", ":", "'", '"""',
        "\\", "\x00", "os._exit(0)", "raise SystemExit", "yield ", "async ", "[0] * 10**9", "é", "\ud800"]  # fmt: skip


def mutated(text: str, rng: random.Random, pieces: Sequence[str], others: Sequence[str]) -> str:
    """The text after one to four changes."""
    text = text[:3_000]
    for _ in range(rng.randint(1, 4)):
        at, end = sorted(rng.randint(0, len(text)) for _ in range(2))
        change = rng.randrange(6)
        if change == 0:
            text = text[:at] + text[end:]
        elif change == 1:
            text = text[:end] + text[at:]
        elif change == 2:
            text = text[:at] + rng.choice(pieces) * rng.choice((1, 1, 1, 2, 40)) + text[at:]
        elif change == 3:
            text = text[:at] + rng.choice(others)[:500] + text[at:]
        elif change == 4:
            text = text[:at] + chr(rng.choice((rng.randrange(32, 127), rng.randrange(0x110000)))) + text[end:]
        else:
            text = text[:at]
    return text


def item(text: str, answer: str | None = None, **extra: Any) -> RewardInput:
    return RewardInput(Prompt("p", "q", (1,), answer, "", extra), Completion(0, 0, (1,), (0.0,), "stop", 0), text)


def fuzz_verifier(count: int, rng: random.Random, workers: int) -> dict[str, Any]:
    """Golds and answers of any shape: nothing raises, crashes or takes longer than its limit."""
    reward = MathReward(limit=LIMIT, workers=workers)
    corpus = [(gold, text) for gold, text, _ in [*CASES, *MORE] if len(text) < 5_000]
    texts = [text for _, text in corpus]
    found: Counter[str] = Counter()
    slowest, samples = 0.0, []
    for start in range(0, count, 500):
        pairs = []
        for _ in range(min(500, count - start)):
            gold, text = rng.choice(corpus)
            gold = mutated(gold, rng, SIGNS, texts) if rng.random() < 0.3 else gold
            pairs.append((gold, mutated(text, rng, SIGNS, texts)))
        verdicts = reward.verify([g for g, _ in pairs], [t for _, t in pairs])
        for pair, verdict in zip(pairs, verdicts, strict=True):
            slowest = max(slowest, verdict.seconds + verdict.reading)
            found["timed out"] += verdict.timed_out
            found["correct"] += verdict.correct
            bad = (
                verdict.crashed,
                verdict.seconds + verdict.reading > LIMIT + GRACE,
                verdict.correct and not verdict.answer,
            )
            for what, happened in zip(("CRASHED", "LATE", "CORRECT WITHOUT ANSWER"), bad, strict=True):
                found[what] += happened
                if happened:
                    samples.append([what, *(part[:200] for part in pair)])
    reward.close()
    return {"part": "verifier", "inputs": count, "slowest": round(slowest, 3), **found, "samples": samples[:5]}


OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv
}  # fmt: skip


def exact(text: str) -> tuple[Fraction, list[int]] | None:
    """Value and numbers of plain ASCII arithmetic by way of Python's own parser, independent of ours."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            tree = ast.parse(text.strip(), mode="eval")
        numbers: list[int] = []

        def value(node: ast.AST) -> Fraction:
            if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
                return OPERATORS[type(node.op)](value(node.left), value(node.right))
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
                return -value(node.operand) if isinstance(node.op, ast.USub) else value(node.operand)
            if isinstance(node, ast.Constant) and type(node.value) is int:
                numbers.append(node.value)
                return Fraction(node.value)
            raise ValueError

        return value(tree.body), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def fuzz_countdown(count: int, rng: random.Random) -> dict[str, Any]:
    """Expressions, whole and broken: a full mark only where Python's arithmetic agrees."""
    reward = CountdownReward()
    found: Counter[str] = Counter()
    slowest, samples = 0.0, []
    for _ in range(count):
        numbers = [rng.randint(1, 99) for _ in range(rng.randint(2, 5))]
        words = [str(n) for n in rng.sample(numbers, len(numbers))]
        expression = words[0]
        for word in words[1:]:
            pair = [expression, word] if rng.random() < 0.5 else [word, expression]
            expression = f"({pair[0]} {rng.choice('+-*/')} {pair[1]})"
        truth = exact(expression)
        if rng.random() < 0.6:
            expression = mutated(expression, rng, [*SIGNS, "+", "-", "*", "/", "**", "//", "(", ")", "1", "x"], words)
        target = str(int(truth[0])) if truth and truth[0].denominator == 1 else str(rng.randint(1, 100))
        began = time.perf_counter()
        (score,) = reward.score([item(f"<answer>{expression}</answer>", target, nums=numbers)])
        slowest = max(slowest, time.perf_counter() - began)
        found["correct"] += score.value == 1
        plain = exact(expression)
        if expression.isascii() and plain and not set(expression) - set("0123456789+-*/() "):
            right = plain[0] == Fraction(target) and Counter(plain[1]) == Counter(numbers)
            # Python also takes signs in a row and ** and //; what we accept must be right, not the other way round.
            if score.value == 1 and not right:
                found["WRONG"] += 1
                samples.append([expression[:200], target, numbers])
    found["LATE"] = slowest > 1
    return {"part": "countdown", "inputs": count, "slowest": round(slowest, 4), **found, "samples": samples[:5]}


def fuzz_sandbox(count: int, rng: random.Random, workers: int) -> dict[str, Any]:
    """Programs that must not pass, leave anything behind, or outlast their limit."""
    before = _processes()
    with tempfile.TemporaryDirectory() as folder:
        victim = Path(folder) / "victim"
        victim.write_text("untouched")
        corpus = [*FOOLING.values(), *HOLDING_UP.values()]
        corpus += [attempt.format(folder=folder) for attempt in ESCAPES.values()]
        reward = CodeReward(limit=LIMIT, memory=256, workers=workers)
        found: Counter[str] = Counter()
        slowest, samples = 0.0, []
        # No mutation of a program without "a + b" adds numbers: whatever passes has fooled us.
        corpus = [program for program in corpus if "a + b" not in program]
        tests = [*TESTS, "assert add(17, 25) == 42", "assert add(1000, 337) == 1337"]
        for start in range(0, count, 50):
            programs = [mutated(rng.choice(corpus), rng, CODE, corpus) for _ in range(min(50, count - start))]
            batch = [item(f"```python\n{p}\n```", tests=tests) for p in programs]
            for program, score in zip(programs, reward.score(batch), strict=True):
                slowest = max(slowest, score.seconds)
                found["timed out"] += score.timed_out
                for what, happened in (("PASSED", score.value == 1), ("FAILED", score.failed),
                                       ("LATE", score.seconds > LIMIT + GRACE)):  # fmt: skip
                    found[what] += happened
                    if happened:
                        samples.append([what, program[:300]])
        (score,) = reward.score([item("```python\ndef add(a, b): return a + b\n```", tests=tests)])
        found["BROKEN AFTERWARDS"] = score.value != 1
        reward.close()
        found["ESCAPED"] = [p.name for p in Path(folder).iterdir()] != ["victim"] or victim.read_text() != "untouched"
        found["ESCAPED"] += Path("escaped").exists()
    time.sleep(1)
    found["LEFT OVER"] = len(_processes() - before)
    return {"part": "sandbox", "inputs": count, "slowest": round(slowest, 3), **found, "samples": samples[:5]}


def _processes() -> set[str]:
    """Helper processes of pools that this process started (their command line names it)."""
    found = set()
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.endswith(b"fork_server.py") for word in words) and str(os.getpid()).encode() in words:
            found.add(place.parent.name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, help="inputs in all")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    options = parser.parse_args()
    rng, bad = random.Random(options.seed), False
    code, sums = options.count // 20, options.count // 4
    parts: list[Callable[[], dict[str, Any]]] = [
        lambda: fuzz_countdown(sums, rng),
        lambda: fuzz_sandbox(code, rng, options.workers),
        lambda: fuzz_verifier(options.count - sums - code, rng, options.workers),
    ]
    for part in parts:
        began = time.perf_counter()
        found = part()
        found["seconds"] = round(time.perf_counter() - began, 1)
        print(json.dumps(found, default=str), flush=True)
        bad |= any(value for key, value in found.items() if key.isupper())
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
