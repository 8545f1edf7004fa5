"""Prompts from a data set of the Hugging Face hub, or from a local folder that ``datasets`` can load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from lit_grpo.data.sources.files import read_saved, saved_kind
from lit_grpo.data.sources.table import Record, TableSource, in_memory
from lit_grpo.errors import UserError
from lit_grpo.utils.hub import from_cache_alone, why_unreachable
from lit_grpo.utils.spelling import nearest


class HubPrompts(TableSource):
    """Questions in one split of a data set of the hub, one a row. Needs the extra ``hub`` (the package datasets).

    Without network a copy in the cache is used; where there is none, the run ends at once.

    Args:
        dataset: name on the hub, or path of a folder, also of one that ``save_to_disk`` wrote.
        config: name of the configuration, if the data set has several.
        split: name of the split; slices such as ``train[:100]`` work too.
        revision: branch, tag or commit; give a commit for a run that can be repeated.
        data_files: file or files of the data set to read, as patterns, where it is several in one repository and names
            no configurations: ``level3to5/train.parquet``. They are the split ``train``. None: as the data set says.

    Raises:
        UserError: ``data_files`` are asked of a folder that ``save_to_disk`` wrote, which has no such files.
    """

    def __init__(
        self,
        dataset: str,
        config: str | None = None,
        split: str = "train",
        revision: str | None = None,
        data_files: str | list[str] | None = None,
        **columns: Any,
    ) -> None:
        super().__init__(**columns)
        self.dataset, self.config, self.split, self.revision = dataset, config, split, revision
        self.data_files = data_files
        self.name = self.name or dataset.rstrip("/").split("/")[-1]

    def place(self) -> str:
        return f"{self.dataset} [{self.split}]"

    def records(self) -> Iterator[Record]:
        if saved_kind(self.dataset) is not None:
            if self.data_files is not None:
                raise UserError(
                    f"{self.dataset} was written by save_to_disk, and has no data files to choose from",
                    where="HubPrompts.data_files",
                    remedy="leave data_files out; split chooses among its splits",
                )
            # A single data set has no splits to choose from, and slices are the loader's business.
            split = self.split if saved_kind(self.dataset) == "DatasetDict" else None
            yield from in_memory(read_saved(self.dataset, split, "HubPrompts.dataset"), self.place())
            return
        try:
            import datasets
        except ImportError as error:
            raise UserError(
                "data sets of the hub need the package datasets", where="HubPrompts", remedy="pip install lit-grpo[hub]"
            ) from error
        offline = self._unreachable()
        try:
            with _offline() if offline else nullcontext():
                table = datasets.load_dataset(
                    self.dataset,
                    self.config,
                    split=self.split,
                    revision=self.revision,
                    data_files=self.data_files,
                )
        except Exception as error:
            # datasets raises a dozen unrelated kinds: network, missing data set, configuration, split, schema.
            raise self._explain(error, offline) from error
        yield from in_memory(table, self.place())

    def _unreachable(self) -> str | None:
        """Say why the hub cannot be asked; None if it can be, or need not, since the data set is a folder."""
        from datasets import config

        if Path(self.dataset).expanduser().exists():
            return None
        return why_unreachable(config.HF_ENDPOINT, config.HF_HUB_OFFLINE)

    def _explain(self, error: Exception, offline: str | None) -> UserError:
        what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if offline is not None and not Path(self.dataset).expanduser().exists():
            return UserError(
                f"cannot load the data set {self.dataset!r}: {offline}, and it is not in the cache",
                where=self.place(),
                remedy="fetch it once where there is a network, or use JsonlPrompts, CsvPrompts or ParquetPrompts",
            )
        guess = nearest(self.split, ("train", "test", "validation")) if "split" in what.lower() else None
        return UserError(
            f"cannot load the data set {self.dataset!r}: {what}",
            where=self.place(),
            remedy=f"did you mean split: {guess}?"
            if guess and guess != self.split
            else "check the name, the configuration and the split; without network use JsonlPrompts or ParquetPrompts",
        )


@contextmanager
def _offline() -> Iterator[None]:
    """Let the hub's client take what is in the cache and ask nobody."""
    from datasets import config

    # The package has read the environment variable when it was imported, so setting it now would do nothing.
    previous, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        with from_cache_alone():
            yield
    finally:
        config.HF_HUB_OFFLINE = previous
