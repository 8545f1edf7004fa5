"""``lit-grpo filter``: sample every training prompt, write its pass rate, keep those of the wanted difficulty."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.cli.argument_parser import CommandParser
from lit_grpo.cli.main import DONE, FAILED
from lit_grpo.cli.training import read_configuration
from lit_grpo.commands.filter.options import Options
from lit_grpo.commands.filter.rate_journal import Rate, RateJournal, all_rates_paths, rates_path
from lit_grpo.errors import UserError
from lit_grpo.utils.files import write_atomically

if TYPE_CHECKING:
    from lit_grpo.types import Prompt

EXAMPLES = """\
Everything else is as for `lit-grpo fit`: several --config, any key as --data.sampling.max_new_tokens 512, and
--ckpt_path to sample from a trained policy.

Pass rates are appended to NAME.rates.jsonl beside --output NAME.jsonl. Killed at any moment, the same command goes on
where it was; with another band it samples nothing and only writes --output anew. The exit code is 1 if none is kept.

examples:
  sometimes right, sometimes wrong:
    lit-grpo filter --config run.yaml --output kept.jsonl --samples 8 --keep-above 0 --keep-below 1
  hard, both of two attempts fail (Numina-Hard):
    lit-grpo filter --config run.yaml --output hard.jsonl --samples 2 --keep-below 0.5
"""

_RESERVED = ("prompt", "answer", "id")


def run(command: str, argv: list[str]) -> int:
    """Sample what has no pass rate yet, write the kept prompts, and return the exit code."""
    parser = CommandParser(command, "Sample every training prompt and keep those of the wanted pass rate.", EXAMPLES)
    parser.add_argument("--config", metavar="FILE", action="append", help="as for fit; may be given several times")
    parser.add_argument("--output", metavar="FILE", required=True, help="prompts that are kept (.jsonl or .jsonl.gz)")
    parser.add_argument("--samples", metavar="K", type=int, help="completions of each prompt (data.group_size)")
    parser.add_argument("--keep-above", metavar="RATE", type=float, help="keep pass rates greater than this")
    parser.add_argument("--keep-below", metavar="RATE", type=float, help="keep pass rates smaller than this")
    parser.add_argument(
        "--batch",
        metavar="N",
        type=int,
        help="prompts sampled at once (data.prompts_per_rollout); a kill loses them",
    )
    args, fit_argv = parser.parse_known_args(argv)
    options = Options(Path(args.output), args.samples, args.keep_above, args.keep_below, args.batch)
    options.check()
    # A mistyped --output must not cost a file of the user's: only what this command wrote is replaced.
    if options.output.exists() and not all_rates_paths(options.output):
        raise UserError(
            f"{options.output} is there, and is no output of an earlier `lit-grpo filter`",
            where="--output",
            remedy="give another file",
        )
    # The arguments of `fit`: --config, which this parser takes so that its --help lists it, is put back.
    fit_argv = [*(word for file in args.config or [] for word in ("--config", file)), *fit_argv]
    layers = read_configuration("fit", fit_argv, parser.options(), start_engine=True)
    from lit_grpo.commands.filter.sampling import run_filter

    trainer, data = run_filter(options, fit_argv, layers)
    # One process writes the output; all have left their rates on the disk by now.
    if not trainer.is_global_zero:
        return DONE
    settings = data.journal.settings
    rates = {r.id: r for path in all_rates_paths(options.output) for r in RateJournal(path, settings).read()}
    return finish(data.train_prompts, rates, options, data.samples)


def finish(prompts: Sequence[Prompt], rates: Mapping[str, Rate], options: Options, samples: int) -> int:
    """Write the prompts of the band, print what was found, and return the exit code."""
    missing = [prompt.id for prompt in prompts if prompt.id not in rates]
    if missing:
        raise RuntimeError(f"{len(missing)} prompts have no pass rate, the first is {missing[0]!r}")
    kept = [prompt for prompt in prompts if options.keeps(rates[prompt.id].pass_rate)]
    clashing = sorted({name for prompt in kept for name in _RESERVED if name in prompt.extra})
    write(options.output, [record(prompt, rates[prompt.id]) for prompt in kept])
    counts = Counter(rates[prompt.id].correct for prompt in prompts)
    print(f"right of {samples}: " + ", ".join(f"{right} {counts[right]:,}" for right in sorted(counts)))
    if clashing:
        print(f"columns renamed to NAME_column, since their names are taken: {', '.join(clashing)}")
    print(f"kept {len(kept):,} of {len(prompts):,} prompts, pass rate {options.band}: {options.output}")
    print(f"pass rates of all: {rates_path(options.output)}")
    return DONE if kept else FAILED


def record(prompt: Prompt, rate: Rate) -> dict[str, Any]:
    """Return a row that ``JsonlPrompts`` reads back as the same prompt."""
    # A column of the user's that has the name of one of ours would come back as the prompt itself.
    extra = {f"{key}_column" if key in _RESERVED else key: value for key, value in prompt.extra.items()}
    asked = prompt.question if prompt.messages is None else [dict(message) for message in prompt.messages]
    row = {"id": prompt.id, "prompt": asked, "answer": prompt.answer_column, "source": prompt.source, **extra}
    return row | {"pass_rate": rate.pass_rate, "samples": rate.samples}


def write(output: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSON Lines, gzip where the name says so, whole or not at all."""
    output.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in records).encode()
    # Without a time in the gzip header the same rows give the same bytes.
    write_atomically(output, gzip.compress(content, mtime=0) if output.name.endswith(".gz") else content)
