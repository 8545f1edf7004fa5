"""Prompts from a data set of the Hugging Face hub, or from a local folder that ``datasets`` can load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lit_grpo.errors import UserError, nearest
from lit_grpo.tasks.table import Record, TableSource, in_memory


class HubPrompts(TableSource):
    """One row of one split is one question. Needs the extra ``hub`` (the package datasets).

    Args:
        dataset: name on the hub, or path of a folder.
        config: name of the configuration, if the data set has several.
        split: one split; slices such as ``train[:100]`` work too.
        revision: branch, tag or commit; give a commit for a run that can be repeated.
        question_column: column of the question.
        answer_column: column of the gold answer; see :class:`lit_grpo.tasks.table.TableSource`.
        id_column: column of the id; None: ``id`` if it is there, else the number of the row.
        where: keep the rows with these values.
        limit: keep the first so many rows.
        name: of the source; the data set's name if left out.
    """

    def __init__(
        self,
        dataset: str,
        config: str | None = None,
        split: str = "train",
        revision: str | None = None,
        question_column: str = "prompt",
        answer_column: str | None = "answer",
        id_column: str | None = None,
        where: dict[str, Any] | None = None,
        limit: int | None = None,
        name: str | None = None,
    ) -> None:
        self.dataset, self.config, self.split, self.revision = dataset, config, split, revision
        super().__init__(
            question_column=question_column,
            answer_column=answer_column,
            id_column=id_column,
            where=where,
            limit=limit,
            name=name or dataset.rstrip("/").split("/")[-1],
        )

    def place(self) -> str:
        return f"{self.dataset} [{self.split}]"

    def records(self) -> Iterator[Record]:
        try:
            import datasets
        except ImportError as error:
            raise UserError(
                "data sets of the hub need the package datasets", where="HubPrompts", remedy="pip install lit-grpo[hub]"
            ) from error
        try:
            table = datasets.load_dataset(self.dataset, self.config, split=self.split, revision=self.revision)
        except Exception as error:  # datasets raises a dozen unrelated kinds: network, missing, config, split, schema
            raise self._explain(error) from error
        yield from in_memory(table, self.place())

    def _explain(self, error: Exception) -> UserError:
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        guess = nearest(self.split, ("train", "test", "validation")) if "split" in what.lower() else None
        return UserError(
            f"cannot load the data set {self.dataset!r}: {what}",
            where=self.place(),
            remedy=f"did you mean split: {guess}?"
            if guess and guess != self.split
            else "check the name, the configuration and the split; without network use JsonlPrompts or ParquetPrompts",
        )
