#!/usr/bin/env python
"""Attack lit-grpo: kill runs, feed it what is malformed, break what it depends on; count what held.

    python scripts/chaos.py kills --help       runs killed with SIGKILL and resumed, compared with unbroken ones
    python scripts/chaos.py inputs --help      malformed configurations, data, models and checkpoints
    python scripts/chaos.py rewards --help     rewards, judges and scorers that hang, crash, lie, or run code
    python scripts/chaos.py faults --help      engines, ranks, trackers, disks and signals
    python scripts/chaos.py long --help        a run of 2,000 rollouts with all monitors: memory, step time, files

Each prints a table and ends with exit code 1 if something did not hold. docs/reliability.md has the last tables.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

PARTS = {"kills": "kills", "inputs": "inputs", "rewards": "rewards", "faults": "faults", "long": "long_run"}


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    if not given or given[0] not in PARTS:
        print(__doc__, file=sys.stderr)
        return 0 if given[:1] in (["-h"], ["--help"]) else 2
    module = importlib.import_module(f"scripts.chaos_cases.{PARTS[given[0]]}")
    return int(module.main(given[1:]))


if __name__ == "__main__":
    raise SystemExit(main())
