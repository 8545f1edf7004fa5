"""docs/evaluation.md: its Python runs, its sets are accepted, its table is what the code knows."""

from __future__ import annotations

import re

import yaml

from lit_grpo.data import BENCHMARKS
from lit_grpo.evaluation import EvaluationSet
from lit_grpo.utils.dataclasses import dataclass_from_dict
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_the_python_runs() -> None:
    (code,) = blocks("python")
    exec(compile(code, "docs/evaluation.md", "exec"), {})


def test_the_sets_are_sets() -> None:
    given = yaml.safe_load(blocks("yaml")[0])["data"]["test"]
    for name, one in given.items():
        one = {key: value for key, value in one.items() if key not in ("prompts", "sampling")}
        assert isinstance(dataclass_from_dict(EvaluationSet, one), EvaluationSet), name
        assert name in BENCHMARKS or name in ("mine", "other")


def test_the_benchmarks_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+?)(?: \((\w+)\))? \| (\w+) \| (\w+), (\w+)[^|]*\| (\d+) \|$", PAGE, re.M)
    known = {
        name: (b.dataset, b.config or "", b.split, b.question, b.answer, str(b.prompts))
        for name, b in BENCHMARKS.items()
    }
    assert {row[0]: row[1:] for row in rows} == known
