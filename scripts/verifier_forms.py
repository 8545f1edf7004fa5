#!/usr/bin/env python
r"""Hold the math verifier to every gold answer of a folder, written in five forms: a table for docs/rewards.md.

    python scripts/verifier_forms.py [--folder ../shared/data] [--every 1] [--workers 2] [--show 5]

Forms: in ``\boxed{}``; in ``<answer>`` on one line; in ``<answer>`` on lines of its own; behind "The answer is"; as the
last number of the text (plain numbers only). Each gold is graded twice in each form: as it is, which must be right, and
with the gold of another question of the file in its place, which must be wrong. The reasoning before a tag boxes and
names the answer that the tag does not hold. Where the two golds may be equal in value the pair is another one: see
``differ``. With `--every n`, only each n-th row is taken.

Prints one line a file and form: right n/N with the own gold, taken n/N with the other one; then up to `--show` of the
golds at fault. Exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from lit_grpo.rewards import MathReward
from lit_grpo.rewards.math.answer import Extract, final_answer
from lit_grpo.rewards.math.grade import kind_of, normal_form

DATA = Path(__file__).parents[2] / "shared/data"
FILES = (
    "gsm8k_train", "gsm8k_test", "aime24", "aime25", "amc23", "college_math_ccby", "dapo_17k", "deepmath_5k",
    "gaokao2023en", "olymmath_en", "olympiadbench_math_en",
)  # fmt: skip
# {gold} is the answer that counts, {other} one that is mentioned on the way.
FORMS: Mapping[str, str] = {
    "boxed": "First I thought of {other}.\nSo we get \\boxed{{gold}}.",
    "tag": "<reasoning>I tried \\boxed{{other}}. The answer is {other}.</reasoning> <answer>{gold}</answer>",
    "tag, own lines": "<reasoning>\nThe answer is {other}.\n</reasoning>\n<answer>\n{gold}\n</answer>\n",
    "answer is": "First I thought of {other}. The answer is {gold}.",
    "last number": "First I thought of {other}. Adding all of them gives {gold}.",
}
EXTRACT: Mapping[str, Extract] = {
    "boxed": "boxed", "tag": "tag", "tag, own lines": "tag", "last number": "last_number"
}  # fmt: skip
"""The setting that lets a form count alone; it must find what ``auto`` finds."""
_PLAIN = re.compile(r"\$?-?\d+(?:,\d{3})*(?:\.\d+)?\$?")


class Line(NamedTuple):
    """Counts of one form in one file, and the golds at fault."""

    file: str
    form: str
    golds: int
    right: int
    """Golds that are right in this form."""
    pairs: int
    taken: int
    """Golds of another question that pass for right."""
    differing: int
    """Texts in which the setting for this form alone finds another answer than ``auto``."""
    refused: list[str]
    fooled: list[tuple[str, str]]


def golds_of(path: Path, every: int = 1) -> list[str]:
    """Read the gold answers of each ``every``-th row."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [str(json.loads(line)["answer"]) for line in lines][::every]


def differ(one: str, other: str) -> bool:
    r"""Say whether two golds surely are not the same answer, by rules that share nothing with the verifier.

    Two plain numbers differ by value. Others differ if, apart from case, spaces, dollars, braces and a few commands,
    they are written otherwise and do not hold the same numbers: with the same numbers they may be two forms of one
    value. So a fraction may still be paired with its decimal, which the counts would then show.
    """
    texts = [
        re.sub(r"\\left|\\right|\\[,;!: ]|[\s${}]|\\d?frac|\\text|\\mathrm", "", gold).lower() for gold in (one, other)
    ]
    if texts[0] == texts[1]:
        return False
    numbers = [[Fraction(n) for n in re.findall(r"\d+(?:\.\d+)?", gold.replace(",", ""))] for gold in (one, other)]
    if all(map(_PLAIN.fullmatch, (one, other))):
        return _value(one) != _value(other)
    return sorted(numbers[0]) != sorted(numbers[1])


def _value(plain: str) -> Fraction:
    return Fraction(re.sub(r"[$,]", "", plain))


def other_golds(golds: Sequence[str]) -> list[str | None]:
    """Return for each gold the next one of the list that surely differs from it; None where there is none."""
    return [
        next((o for j in range(1, len(golds)) if differ(gold, o := golds[(i + j) % len(golds)])), None)
        for i, gold in enumerate(golds)
    ]


def written(form: str, gold: str, other: str) -> str:
    """Return a completion that gives ``gold`` in a form and mentions ``other`` before, where the form allows it."""
    return FORMS[form].replace("{other}", other).replace("{gold}", gold)


def sweep(name: str, golds: Sequence[str], reward: MathReward) -> Iterator[Line]:
    """Grade all golds of a file in all forms."""
    plain = [gold for gold in golds if _PLAIN.fullmatch(gold)]
    pairs = list(zip(golds, other_golds(golds), strict=True))
    plain_pairs = list(zip(plain, other_golds(plain), strict=True))
    # All forms in one call: a pair of gold and answer that several forms give is compared once.
    asked: list[tuple[str, str, str, bool]] = []
    for form in FORMS:
        for gold, other in plain_pairs if form == "last number" else pairs:
            asked.append((form, gold, written(form, gold, other or "0"), True))
            if other is not None:
                asked.append((form, gold, written(form, other, gold), False))
    verdicts = reward.verify([gold for _, gold, _, _ in asked], [text for _, _, text, _ in asked])
    for form in FORMS:
        own = [(g, t, v) for (f, g, t, is_own), v in zip(asked, verdicts, strict=True) if f == form and is_own]
        wrong = [(g, t, v) for (f, g, t, is_own), v in zip(asked, verdicts, strict=True) if f == form and not is_own]
        if not own:
            continue
        differing = 0
        if form in EXTRACT:
            alone = [final_answer(t, kind_of(g), extract=EXTRACT[form]) or "" for g, t, _ in own + wrong]
            found = [v.answer or "" for _, _, v in own + wrong]
            differing = sum(a != f and normal_form(a) != normal_form(f) for a, f in zip(alone, found, strict=True))
        refused = [g for g, _, v in own if not v.correct]
        fooled = [(g, v.answer or "") for g, _, v in wrong if v.correct]
        yield Line(name, form, len(own), len(own) - len(refused), len(wrong), len(fooled), differing, refused, fooled)


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown table: a row for each file, a column for each form."""
    rows = [f"| file | golds | {' | '.join(FORMS)} |", "|---" * (len(FORMS) + 2) + "|"]
    for name in dict.fromkeys(line.file for line in lines):
        of_file = {line.form: line for line in lines if line.file == name}
        cells = [f"{f.right}/{f.golds}, {f.taken}/{f.pairs}" if (f := of_file.get(form)) else "" for form in FORMS]
        rows.append(f"| {name} | {of_file['boxed'].golds} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=DATA, help="the files NAME.jsonl.gz")
    parser.add_argument("--files", nargs="+", default=FILES, metavar="NAME", help="of these files only")
    parser.add_argument("--every", type=int, default=1, help="take each n-th row")
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--show", type=int, default=5, help="golds at fault that are shown for a file and form")
    options = parser.parse_args()
    reward = MathReward(limit=30.0, workers=options.workers)
    lines: list[Line] = []
    for name in options.files:
        began = time.perf_counter()
        for line in sweep(name, golds_of(options.folder / f"{name}.jsonl.gz", options.every), reward):
            lines.append(line)
            print(f"{line.file}, {line.form}: right {line.right}/{line.golds}, another's gold taken "
                  f"{line.taken}/{line.pairs}, found otherwise alone {line.differing}", flush=True)  # fmt: skip
            for gold in line.refused[: options.show]:
                print(f"    refused: {gold!r}")
            for gold, answer in line.fooled[: options.show]:
                print(f"    taken: {answer!r} for {gold!r}")
        print(f"  {time.perf_counter() - began:.1f} s", flush=True)
    reward.close()
    print(table(lines))
    return int(any(line.refused or line.fooled or line.differing for line in lines))


if __name__ == "__main__":
    sys.exit(main())
