"""The table of model families: its cheap cells on every run, and what docs/models.md says of all of them."""

from __future__ import annotations

import re

import pytest

from scripts.model_families import BEGIN, COLUMNS, END, TARGET, cells
from scripts.model_families_cases.families import FAMILIES

FAST = ("llama", "deepseek_v3", "mamba", "lfm2", "falcon", "bloom", "llama4_text", "granite", "gpt_oss", "qwen3_next")
"""One of each kind: plain, latent attention, states, convolutions, own attention classes, no positions, chunks, scales,
sinks, linear attention."""


@pytest.mark.parametrize("family", FAST)
def test_a_family_is_exact_or_refused_with_a_remedy_that_works(family):
    found = cells(family, ("padded", "shared", "engine"))
    assert found["padded"] in ("exact", "refused")
    assert found["engine"] == "exact"
    assert not [cell for cell in found.values() if cell.startswith("wrong")], found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAST)
def test_adapters_critic_experts_and_gradients_of_a_family(family):
    found = cells(family, ("eager", "LoRA", "critic", "experts", "gradient"))
    assert not [cell for cell in found.values() if cell.startswith("wrong")], found


def test_the_table_in_the_docs_is_of_these_families_and_has_nothing_wrong():
    text = TARGET.read_text(encoding="utf-8")
    table = text.partition(BEGIN)[2].partition(END)[0]
    rows = {
        row[0]: row[1:] for row in (re.split(r" *\| *", line.strip("| ")) for line in table.splitlines() if "|" in line)
    }
    del rows["family"]
    rows = {name: row for name, row in rows.items() if not name.startswith("-")}
    assert set(rows) == set(FAMILIES)
    assert len(rows) >= 40
    assert all(len(row) == len(COLUMNS) for row in rows.values())
    assert not [row for row in rows.values() if any(cell.startswith("wrong") for cell in row)]
