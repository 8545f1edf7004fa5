"""A mixture of several sources in given shares."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lit_grpo.data.sources.base import PromptSource, Row
from lit_grpo.errors import UserError


class MixedPrompts(PromptSource):
    """Prompts of several sources, in given shares.

    With weights every 64 prompts in a row hold each source's share of them, as nearly as whole numbers can, in a seeded
    order; each source is gone through in an order of its own, and begins anew when it is at its end, so a small source
    with a large weight is seen more often. Ids begin with the name of their source.

    Args:
        sources: the sources to mix, of distinct names (each has the argument ``name``).
        weights: one weight for each source, of which only the ratios count: ``[3, 1]`` is three of the first to one of
            the second. None: all rows are shuffled together, so every source has the share of its size.
        name: name of the mixture.
    """

    def __init__(self, sources: list[PromptSource], weights: list[float] | None = None, name: str = "mixture") -> None:
        self.sources, self.name = sources, name
        if not sources:
            raise UserError("there are no sources to mix", where="MixedPrompts.sources", remedy="list at least one")
        if weights is not None and len(weights) != len(sources):
            raise UserError(
                f"there are {len(weights)} weights for {len(sources)} sources",
                where="MixedPrompts.weights",
                remedy="give one for each source, in their order",
            )
        if weights is not None and not all(w > 0 and math.isfinite(w) for w in weights):
            raise UserError(
                f"a weight is not above 0: {weights}", where="MixedPrompts.weights", remedy="leave that source out"
            )
        doubles = [n for n, count in Counter(source.name for source in sources).items() if count > 1]
        if doubles:
            raise UserError(
                f"two sources are named {doubles[0]!r}; they would be counted as one",
                where="MixedPrompts.sources",
                remedy="give one of them another init_args.name",
            )
        self._weights = weights
        self._rows: list[Row] | None = None

    @property
    def weights(self) -> Mapping[str, float] | None:
        if self._weights is None:
            return None
        total = sum(self._weights)
        return {s.name: weight / total for s, weight in zip(self.sources, self._weights, strict=True)}

    def rows(self) -> Sequence[Row]:
        """Return all rows of all sources, in order."""
        if self._rows is None:
            self._rows = [self._named(row, source.name) for source in self.sources for row in source.rows()]
        return self._rows

    def columns_taken(self) -> list[str]:
        return [line for source in self.sources for line in source.columns_taken()]

    @staticmethod
    def _named(row: Row, source: str) -> Row:
        # Some sources begin their ids with their name already, and a benchmark's id must not become name/name/number.
        identity = row.id if row.id.startswith(f"{source}/") else f"{source}/{row.id}"
        return replace(row, id=identity, source=source)
