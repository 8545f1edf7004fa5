"""The report of a run: one page that says how it went and what went wrong, and shows it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_grpo.report.writer import ReportWriter

__all__ = ["ReportWriter"]


def __getattr__(name: str) -> object:
    # Importing Lightning takes seconds; writing a report of a run folder does not need it.
    if name == "ReportWriter":
        from lit_grpo.report.writer import ReportWriter

        return ReportWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
