"""The options of ``lit-grpo filter``, and the band of pass rates they describe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_grpo.errors import UserError


@dataclass
class Options:
    """Options of the filter: the band of pass rates, the output file, and how much is sampled.

    Attributes:
        output: JSON Lines file of the prompts that are kept.
        samples: completions of each prompt; None: ``data.group_size``.
        above: keep pass rates greater than this; None: no such bound.
        below: keep pass rates smaller than this; None: no such bound.
        batch: prompts sampled before their rates are written; None: ``data.prompts_per_rollout``.
        ckpt_path: checkpoint whose policy samples; None: the model of the configuration.
    """

    output: Path
    samples: int | None = None
    above: float | None = None
    below: float | None = None
    batch: int | None = None
    ckpt_path: str | None = None

    def check(self) -> None:
        """Refuse options that make no sense, before anything is loaded.

        Raises:
            UserError: an option is out of range, or no pass rate can be in the band.
        """
        for name, number in (("--samples", self.samples), ("--batch", self.batch)):
            if number is not None and number < 1:
                raise UserError(f"{name} is {number}, must be at least 1", where="command line")
        # Bounds that are left out lie outside all pass rates, so that 0 and 1 are kept.
        low, high = -1.0 if self.above is None else self.above, 2.0 if self.below is None else self.below
        for name, given in (("--keep-above", self.above), ("--keep-below", self.below)):
            if given is not None and not 0 <= given <= 1:
                raise UserError(f"{name} is {given}, a pass rate is from 0 to 1", where="command line")
        if low >= high or low >= 1 or high <= 0:
            raise UserError(
                f"no pass rate is {self.band}",
                where="command line",
                remedy="the bounds themselves are out: --keep-above 0 --keep-below 1 keeps what is sometimes right",
            )
        if not self.output.name.removesuffix(".gz").endswith(".jsonl"):
            stem = self.output.name.partition(".")[0] or "kept"
            raise UserError(
                f"--output {self.output} is no .jsonl or .jsonl.gz file",
                where="command line",
                remedy=f"--output {self.output.parent / stem}.jsonl",
            )

    @property
    def band(self) -> str:
        """The band in words: ``above 0 and below 1``, or ``known`` without bounds."""
        bounds = [f"{word} {x:g}" for word, x in (("above", self.above), ("below", self.below)) if x is not None]
        return " and ".join(bounds) or "known"

    def keeps(self, rate: float) -> bool:
        """Tell whether a pass rate is in the band, to which its bounds do not belong."""
        return (self.above is None or rate > self.above) and (self.below is None or rate < self.below)
