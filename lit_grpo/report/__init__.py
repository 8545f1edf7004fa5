"""The report of a run: one page that says how it went and what went wrong, and shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_grpo.utils.imports import lazy_attributes

if TYPE_CHECKING:
    from lit_grpo.report.compare import write_comparison as write_comparison
    from lit_grpo.report.run import read_folder as read_folder
    from lit_grpo.report.writer import ReportWriter as ReportWriter

_MODULES = {"ReportWriter": "writer", "read_folder": "run", "write_comparison": "compare"}

# Importing Lightning takes seconds; writing a report of a run folder does not need it.
__getattr__ = lazy_attributes(__name__, _MODULES)
__all__ = sorted(_MODULES)
