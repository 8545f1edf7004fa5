"""Base of all parts of an objective: what a part says about itself, so that adding one changes one file."""

from __future__ import annotations

from typing import NoReturn

from lit_grpo.errors import UserError

WHERE = "model.objective"
"""Key of the configuration below which every setting of every part stands, flat."""


class Part:
    """A part of an objective: a frozen dataclass whose fields are the settings that a user may override.

    The docstring of the class becomes its row in docs/objectives.md, and the docstring below each field the help of
    its key: a setting that several parts share needs one in the first of them only.
    """

    def labels(self) -> dict[str, str]:
        """Return the switches that make a method another one, as they show in a run's name; numbers are left out."""
        return {}

    def check(self) -> None:
        """Refuse settings that are wrong whatever the other parts are.

        Raises:
            UserError: a number outside its range.
        """

    def idle(self, *, critic: bool) -> dict[str, str]:
        """Return the settings that do nothing as the part is set, with the reason: giving one of them is refused.

        Args:
            critic: whether the objective's advantages come from a critic.
        """
        return {}

    @property
    def uses_correct(self) -> tuple[str, ...]:
        """The settings by which the part, as it is set, asks which completions are correct; empty if it does not."""
        return ()

    @property
    def state_fields(self) -> frozenset[str]:
        """Fields of :class:`ObjectiveState` that the part uses."""
        return frozenset()


def on_off(value: object) -> str:
    """Return ``on`` for what is set, ``off`` for 0, False and None."""
    return "on" if value else "off"


def refuse(key: str, reason: str, remedy: str | None = None) -> NoReturn:
    """Raise a :class:`UserError` that names the setting ``key``."""
    raise UserError(reason, where=f"{WHERE}.{key}", remedy=remedy)
