#!/usr/bin/env python
"""Write the rules that come with lit-grpo into docs/monitors.md, between two marks.

python scripts/rules_table.py            # writes
python scripts/rules_table.py --check    # exit code 1 if the document is not up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from lit_grpo.callbacks.monitors.rules import RULES  # noqa: E402
from lit_grpo.callbacks.monitors.threshold import Rule  # noqa: E402

DOCUMENT = ROOT / "docs/monitors.md"
MARKS = ("<!-- rules: scripts/rules_table.py -->", "<!-- end of rules -->")


def row(rule: Rule) -> str:
    """Make the line of one rule."""
    limit = rule.above if rule.above is not None else rule.below
    bound = f"{'above' if rule.above is not None else 'below'} {limit:g}"
    bound += f" times {rule.of}" if rule.of else ""
    bound += f" on average of {rule.for_rollouts} rollouts" if rule.on_average else ""
    bound += f" for {rule.for_rollouts} rollouts" if rule.for_rollouts > 1 and not rule.on_average else ""
    severity = rule.severity + (f", critical for {rule.critical_for}" if rule.critical_for else "")
    cells = (f"`{rule.key}`", rule.healthy, f"`{rule.name}`: {bound} ({severity})", rule.source, rule.remedies[0])
    return f"| {' | '.join(cells)} |"


def render() -> str:
    """Make the table."""
    head = "| metric | healthy | finding: bound | source | what to do first |\n|---|---|---|---|---|"
    return "\n".join([head, *map(row, RULES)])


def main(argv: list[str]) -> int:
    text = DOCUMENT.read_text(encoding="utf-8")
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    new = f"{text[:start]}\n\n{render()}\n\n{text[end:]}"
    if "--check" in argv:
        return int(new != text)
    DOCUMENT.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
