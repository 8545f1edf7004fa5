"""Errors that end a run. A :class:`UserError` is shown in one screen without a traceback (see ``lit_grpo.cli``)."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: what is wrong, where, and what to do.

    Args:
        what: one sentence that names the thing and its value.
        where: file and line, or the key of the configuration, if known.
        remedy: what to type instead.
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what, self.where, self.remedy = what, where, remedy
        lines = [what]
        if where:
            lines.append(f"  where: {where}")
        if remedy:
            lines.append(f"  remedy: {remedy}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword arguments do not survive pickling (worker processes) on their own.
        return (_rebuild, (type(self), self.what, self.where, self.remedy))


def _rebuild(cls: type[UserError], what: str, where: str | None, remedy: str | None) -> UserError:
    return cls(what, where=where, remedy=remedy)


class StopRun(Exception):  # noqa: N818 - it is a decision, not an error
    """The decision of a monitor or guard to end the run: exit code 3, with a checkpoint.

    Args:
        reason: why the run ends, in one sentence.
        diagnosis: name of the diagnosis behind it, see :mod:`lit_grpo.callbacks.diagnosis.diagnosis`; None without one.
    """

    def __init__(self, reason: str, diagnosis: str | None = None) -> None:
        self.reason, self.diagnosis = reason, diagnosis
        super().__init__(reason)


class EngineError(RuntimeError):
    """Failure of the rollout engine: exit code 1, with a checkpoint.

    Args:
        message: what failed.
        transient: whether trying again with fewer samples at once may succeed (memory ran out).
    """

    def __init__(self, message: str, *, transient: bool = False) -> None:
        self.transient = transient
        super().__init__(message)
