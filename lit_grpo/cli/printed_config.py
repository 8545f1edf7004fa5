"""What ``--print_config`` prints: the configuration, with the recipe's own values in the place of nulls."""

from __future__ import annotations

import re
from typing import Any

import yaml

from lit_grpo.errors import UserError
from lit_grpo.learner.run_checks import resolve_objective
from lit_grpo.objectives import ObjectiveConfig

_HEAD = (
    "    # The recipe's own values, as comments: one without its # changes the recipe. What does not apply is left out."
)


def with_recipe(text: str) -> str:
    """Put comments with the recipe's values in the place of the nulls of ``model.objective``.

    They are comments, so that the text is the same configuration as before: another recipe in its first line comes with
    its own values, and is not half the one that was printed.

    Args:
        text: the configuration as YAML, which is returned as it is where the objective in it cannot be made.
    """
    model = (yaml.safe_load(text) or {}).get("model") or {}
    settings: dict[str, Any] = model.get("objective") or {}
    try:
        values = resolve_objective(ObjectiveConfig(**settings), model.get("max_staleness") or 0).describe()
    # A run would end with this error; here it is the configuration that was asked for.
    except UserError:
        return text
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if re.match(r" {0,2}\S", line):
            inside = line == "  objective:"
        null = re.fullmatch(r"    (\w+): null", line) if inside else None
        if null is None:
            lines.append(line)
            continue
        if _HEAD not in lines:
            lines.append(_HEAD)
        if values.get(null[1]) is not None:
            shown = yaml.safe_dump({null[1]: values[null[1]]}, default_flow_style=True, width=1000).strip()[1:-1]
            lines.append(f"    # {shown}")
    return "\n".join(lines) + "\n"
