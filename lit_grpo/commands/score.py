"""``lit-grpo score``: score ready completions with the rewards of a run.

It needs no model, and imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from lit_grpo.errors import UserError

if TYPE_CHECKING:
    from lit_grpo.rewards.base import Reward
    from lit_grpo.rewards.combine import OnError
    from lit_grpo.types import RewardInput

log = logging.getLogger(__name__)

EXAMPLES = """\
A line of the input: {"prediction": "... \\\\boxed{4}", "answer": "4"}; `gold` stands in for a missing `answer`.
`id`, `prompt`, `tokens` (how many the prediction has) and `finish_reason` ("length": cut off) are used where they are
there; rewards see every field.
A line of the output: {"correct": true, "reward": {"math": 1.0}, "timed_out": false, "seconds": 0.002, ...}. `correct`
is what the first reward says that grades answers, null where none does.

FILE of --config is a list under `rewards:`, as in a run's configuration, or such a configuration as a whole.
The math verifier grades where there is none. Exit code 2 for bad input; then nothing has been graded.

examples:
  lit-grpo score --input pairs.jsonl > verdicts.jsonl
  zcat pairs.jsonl.gz | lit-grpo score --input - --config reward.yaml --output verdicts.jsonl
"""
# Lines scored together: enough to keep every worker busy, few enough to see results come.
_CHUNK = 1024


class Totals(NamedTuple):
    """Counts and means of a scored file, for the line at the end."""

    lines: int
    correct: int
    graded: bool
    """True if any reward says what is correct."""
    timed_out: int
    failed: int
    seconds: float
    means: dict[str, float]
    """Mean of each reward over what it scored, before its weight; absent where it scored nothing."""
    judged: int = 0
    """Lines with a verdict."""
    unscored: int = 0
    """Lines that no reward scored."""


def run(command: str, argv: list[str]) -> int:
    """Score the completions, print the totals, and return the exit code: 1 where a reward failed."""
    from lit_grpo.cli.argument_parser import CommandParser

    parser = CommandParser(command, "Judge ready completions with any reward. No model is needed.", EXAMPLES)
    parser.add_argument("--input", required=True, metavar="FILE", help="JSON Lines, gzip or not; - is standard input")
    parser.add_argument("--config", metavar="FILE", help="YAML with `rewards:`, or the configuration of a run")
    parser.add_argument("--output", metavar="FILE", help="where the verdicts go; standard output if left out")
    parser.add_argument("--on-error", choices=("raise", "zero"), help="a reward that fails ends it, or scores 0")
    options = parser.parse_args(argv)
    # Rewards of the user may lie next to the configuration.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    _check_output(options.output, options.input, options.config)
    rewards, on_error = read_rewards(options.config)
    from lit_grpo.rewards.combine import RewardError

    try:
        log.debug("starting the workers of %d rewards", len(rewards))
        # Workers import what they need while the lines are read.
        for reward in rewards:
            reward.start()
        # All lines are read and checked first: bad input ends the command before anything is graded or written.
        items = read_items(options.input, rewards)
        if options.output and _same_file(options.output, options.input):
            raise UserError("the output would overwrite the input", where="--output", remedy="name another file")
        with _opened(options.output) as file:
            totals = score(items, rewards, options.on_error or on_error, file)
    except RewardError as error:
        print(f"lit-grpo {command}: {error}", file=sys.stderr)
        return 1
    # Whoever reads the output, such as `head`, has seen enough.
    except BrokenPipeError:
        # Without this Python would fail again when it flushes standard output at its exit.
        sys.stdout = None
        return 1
    finally:
        for reward in rewards:
            reward.close()
    print(_summary(totals), file=sys.stderr)
    return 0


def read_rewards(config: str | None) -> tuple[list[Reward], OnError]:
    """Read the rewards of a configuration file, and whether a failing one ends the run or scores 0.

    Raises:
        UserError: the file cannot be read or lists no rewards, or one of them is wrong.
    """
    if config is None:
        from lit_grpo.rewards.math.verify import MathReward

        return [MathReward()], "raise"
    import argparse

    import yaml

    from lit_grpo.cli.config_files import find, read_layers
    from lit_grpo.cli.errors.error_messages import Explainer, user_error_below
    from lit_grpo.cli.text_values import TextParser, make_checked
    from lit_grpo.rewards.base import Reward
    from lit_grpo.rewards.combine import OnError, check_rewards

    layers = read_layers(["--config", config], "score")
    loaded = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    content = loaded if isinstance(loaded, dict) else {}
    # The configuration of a run has its rewards under `data:`, a file for this command at its top.
    inner = content["data"] if isinstance(content.get("data"), dict) else content
    prefix = "data." if inner is not content else ""
    if not inner.get("rewards"):
        raise UserError(
            "the configuration lists no rewards",
            where=config,
            remedy="rewards: [{class_path: lit_grpo.rewards.MathReward}]",
        )
    known = {"rewards", "on_reward_error"}
    if not prefix and (unknown := next((key for key in content if key not in known), None)) is not None:
        found = find(layers, str(unknown))
        place = str(found[0].place(found[1])) if found else config
        raise UserError(
            f"there is no key `{unknown}`", where=place, remedy=f"the keys here are {' and '.join(sorted(known))}"
        )
    names = [prefix + key for key in sorted(known)]
    explainer = Explainer("score", [], layers, names)
    parser = TextParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument(f"--{prefix}rewards", type=list[Reward])
    parser.add_argument(f"--{prefix}on_reward_error", type=OnError, default="raise")
    given = {key: value for key, value in inner.items() if key in known}
    try:
        parsed = parser.parse_object({"data": given} if prefix else given)
        built = parser.instantiate(parsed, instantiators=[(make_checked, object, True)])
        rewards, on_error = built[f"{prefix}rewards"], built[f"{prefix}on_reward_error"]
        check_rewards(rewards, f"{prefix}rewards")
    except (argparse.ArgumentError, ValueError) as error:
        if (cause := user_error_below(error)) is not None:
            raise explainer.locate(cause) from error
        raise explainer.explain(str(error)) from error
    return rewards, on_error


def read_items(source: str, rewards: Sequence[Reward]) -> list[tuple[RewardInput, Any]]:
    """Read every line as the input of a reward, with its ``id`` (None where it has none).

    Raises:
        UserError: a line is bad; it names the first one, with file and line.
    """
    from lit_grpo.data.sources.jsonl import JsonlPrompts, decoded, json_object

    if source == "-":
        lines = enumerate(sys.stdin.buffer, start=1)
        places = ((f"standard input:{number}", line) for number, line in lines if line.strip())
        records: Iterable[tuple[Mapping[str, Any], str]] = (
            (json_object(decoded(line, where), where), where) for where, line in places
        )
    elif Path(source).is_file():
        records = JsonlPrompts(source).records()
    else:
        raise UserError(f"there is no file {source}", where="--input", remedy="name a JSON Lines file, or - for a pipe")
    return [(_item(row, where, rewards), row.get("id")) for row, where in records]


def _item(row: Mapping[str, Any], where: str, rewards: Sequence[Reward]) -> RewardInput:
    from lit_grpo.types import Completion, Prompt, RewardInput

    source = str(row.get("source") or "")
    try:
        selected = [reward.for_source(source) for reward in rewards]
    except UserError as error:
        raise UserError(error.what, where=f"{where}, field `source`", remedy=error.remedy) from error
    comparing = next((reward.name for reward in selected if reward.needs_answer), None)
    counting = next((reward.name for reward in selected if reward.needs_tokens), None)
    text = row.get("prediction")
    if not isinstance(text, str):
        what = (
            "has no field `prediction`" if text is None else f"has a `prediction` that is {_json_type(text)}, not text"
        )
        raise UserError(
            f"the line {what}", where=where, remedy=f"it has the fields {', '.join(map(repr, row)) or '(none)'}"
        )
    answer = row.get("answer", row.get("gold"))
    golds = answer if isinstance(answer, list) else [] if answer is None else [answer]
    odd = next((gold for gold in golds if isinstance(gold, (bool, list, dict)) or gold is None), None)
    if odd is not None or None in golds or answer == []:
        raise UserError(
            f"the line has an `answer` that is {_json_type(answer)}, not text or a number, nor a list of these",
            where=where,
            remedy='write it as text, as in "answer": "1, 2", and several right answers as ["1/2", "0.5"]',
        )
    if answer is None and comparing is not None:
        raise UserError(
            f"the line has no field `answer`, and the reward {comparing!r} compares with it",
            where=where,
            remedy="add the gold answer as text",
        )
    tokens = row.get("tokens", 0 if counting is None else None)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise UserError(
            "the line has no field `tokens`" if tokens is None else f"`tokens` is {str(tokens)[:40]!r}",
            where=where,
            remedy="give the number of tokens of the prediction"
            + (f"; the reward {counting!r} goes by it" if counting else ""),
        )
    cut = row.get("finish_reason") == "length"
    # No tokenizer here: rewards that go by length need only the number of tokens.
    ids = (0,) * tokens
    completion = Completion(0, 0, ids, (), "length" if cut else "stop", 0)
    question = row.get("prompt", row.get("question"))
    prompt = Prompt(
        id=str(row.get("id", where)),
        question=question if isinstance(question, str) else "",
        token_ids=(),
        answer=str(golds[0]) if golds else None,
        source=source,
        extra=dict(row),
        other_answers=tuple(str(gold) for gold in golds[1:]),
    )
    return RewardInput(prompt, completion, text)


def _json_type(value: object) -> str:
    return {bool: "true or false", list: "a list", dict: "an object"}.get(type(value), "a number")


def score(
    items: Sequence[tuple[RewardInput, Any]], rewards: Sequence[Reward], on_error: OnError, file: TextIO
) -> Totals:
    """Score items and write one line for each, in order."""
    from lit_grpo.rewards.base import primary_reward, verdicts, weighted_sums
    from lit_grpo.rewards.combine import score_all

    started = time.perf_counter()
    num_correct = num_timed_out = num_failed = num_judged = num_unscored = 0
    sums = dict.fromkeys([reward.name for reward in rewards], 0.0)
    counts = dict.fromkeys(sums, 0)
    for start in range(0, len(items), _CHUNK):
        chunk = items[start : start + _CHUNK]
        log.debug("scoring lines %d to %d of %d", start + 1, start + len(chunk), len(items))
        scores = score_all(rewards, [item for item, _ in chunk], on_error)
        found = verdicts(rewards, scores, [item.prompt.source for item, _ in chunk])
        for i, (_, identity) in enumerate(chunk):
            of_item = {name: column[i] for name, column in scores.items()}
            correct = None if found is None else found[i]
            timed_out, failed = any(s.timed_out for s in of_item.values()), any(s.failed for s in of_item.values())
            line: dict[str, Any] = {
                "correct": correct,
                "reward": {name: None if score.skipped else score.value for name, score in of_item.items()},
                "timed_out": timed_out,
                "seconds": round(sum(score.seconds for score in of_item.values()), 4),
                "failed": failed,
            }
            if identity is not None:
                line = {"id": identity, **line}
            print(json.dumps(line), file=file)
            num_correct += bool(correct)
            num_judged += correct is not None
            num_timed_out += timed_out
            num_failed += failed
            for name, score in of_item.items():
                if not score.skipped:
                    sums[name] += score.value
                    counts[name] += 1
        num_unscored += sum(math.isnan(total) for total in weighted_sums(rewards, scores))
        # Flushed chunk by chunk, so that a pipe or a reader sees results as they come.
        file.flush()
    means = {name: sums[name] / counts[name] for name in sums if counts[name]}
    graded = primary_reward(rewards) is not None
    seconds = time.perf_counter() - started
    return Totals(len(items), num_correct, graded, num_timed_out, num_failed, seconds, means, num_judged, num_unscored)


def _check_output(output: str | None, source: str, config: str | None) -> None:
    """Refuse to write the verdicts over what is read.

    Raises:
        UserError: the file of the verdicts is the input or the configuration.
    """
    if output is None or not Path(output).exists():
        return
    # By the file and not by its name: a link leads to it too.
    target = Path(output).stat()
    if stat.S_ISCHR(target.st_mode):
        return
    for key, name in (("--input", source), ("--config", config)):
        try:
            other = os.fstat(sys.stdin.fileno()) if name == "-" else Path(name).stat() if name else None
        except (OSError, ValueError):
            # No such file, or no real standard input: what reads it says so.
            continue
        if other is not None and os.path.samestat(target, other):
            raise UserError(
                f"{output} is the file of {key}, which it would overwrite",
                where="--output",
                remedy="give the verdicts a file of their own",
            )


@contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    # Opened outside the `with` that closes it, so that only a failure to open becomes an error of --output.
    try:
        file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}", where="--output") from error
    with file:
        yield file


def _same_file(output: str, source: str) -> bool:
    return Path(output).exists() and Path(source).exists() and Path(output).samefile(source)


def _summary(totals: Totals) -> str:
    share = f", {100 * totals.correct / totals.judged:.1f} %" if totals.judged else ""
    if totals.judged < totals.lines:
        share += f" of the {totals.judged} with a verdict"
    clauses = [f"{totals.lines} lines"]
    if totals.graded:
        clauses.append(f"{totals.correct} correct{share}")
    clauses += [f"mean {name} {mean:.4g}" for name, mean in totals.means.items()]
    if totals.unscored:
        clauses.append(f"{totals.unscored} that no reward scored")
    clauses += [f"{totals.timed_out} timed out"]
    if totals.failed:
        clauses.append(f"{totals.failed} failed")
    return f"{'; '.join(clauses)}; {totals.seconds:.1f} s"
