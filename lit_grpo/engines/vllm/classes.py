"""Keep vLLM's changes of classes to vLLM: the learner's model is an instance of the same classes.

vLLM serves a model that it has no class of its own for by transformers' class (SmolLM 3, OLMo 2 and 3, GLM, GPT-NeoX
and many more). It then changes that class itself: a further base, another ``__init__`` and another ``__call__``, which
looks for attributes that only its own instances have. The learner's forward pass would end in an AttributeError, and
every later instance be vLLM's.

Nothing here knows what vLLM changes, or in which classes. All classes of modules are noted before the engine is built.
Of each that is another afterwards, vLLM's instances get a subclass with the changes, and the class is what it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

_NO_ATTRIBUTE = object()
# Python keeps these itself, and none of them can be copied to another class.
_PYTHONS_OWN = frozenset({"__dict__", "__weakref__", "_abc_impl", "__abstractmethods__"})
_OWNER = "vllm"
"""Package whose classes are its own to change."""


@dataclass(frozen=True)
class _Noted:
    """A class as it was."""

    bases: tuple[type, ...]
    attributes: dict[str, Any]


class ClassChanges:
    """The classes of modules as they were, and what has become of them since."""

    def __init__(self) -> None:
        self._before = {cls: _Noted(cls.__bases__, dict(vars(cls))) for cls in _module_classes()}
        self.changed: dict[type, type] = {}
        """Class that was changed -> subclass that is as the change made it; filled by :meth:`undo`."""

    def undo(self) -> None:
        """Make every class what it was, and keep what it had become in a subclass of it."""
        # All are compared before any is put back: a base that is put back would look like a change of its subclasses.
        found = {cls: change for cls, noted in self._before.items() if (change := _change(cls, noted)) is not None}
        for cls, (bases, attributes) in found.items():
            noted = self._before[cls]
            if bases != noted.bases:
                cls.__bases__ = noted.bases
            for name in attributes:
                _set(cls, name, noted.attributes.get(name, _NO_ATTRIBUTE))
        for cls, (bases, attributes) in found.items():
            added = tuple(base for base in bases if base not in self._before[cls].bases)
            kept = {name: value for name, value in attributes.items() if value is not _NO_ATTRIBUTE}
            # A subclass and no copy: methods of the class call `super()`, which takes its instances alone.
            self.changed[cls] = type(cls)(
                cls.__name__, (cls, *added), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **kept}
            )

    def adopt(self, model: nn.Module) -> None:
        """Let the modules in ``model`` that were built by a changed class go on with the change."""
        for module in model.modules():
            if (cls := self.changed.get(type(module))) is not None:
                module.__class__ = cls


@contextlib.contextmanager
def classes_left_alone() -> Iterator[ClassChanges]:
    """Undo what happens to classes of modules inside, also where it ends with an error."""
    changes = ClassChanges()
    try:
        yield changes
    finally:
        changes.undo()


def load_classes(folder: Path) -> None:
    """Import the transformers classes of a model folder, so that they are noted before vLLM can change them.

    Without effect where the folder's code is its own, or is not on this machine: such classes are noted if the learner
    has made its model by then.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    if not folder.is_dir():
        return
    # What is wrong with the folder is vLLM's to say.
    with contextlib.suppress(Exception):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for auto in (AutoModel, AutoModelForCausalLM):
            with contextlib.suppress(KeyError):
                auto._model_mapping[type(config)]


def _module_classes() -> set[type]:
    """Return all classes of modules but those of vLLM."""
    found: set[type] = set()
    waiting: list[type] = [nn.Module]
    while waiting:
        cls = waiting.pop()
        if cls not in found:
            found.add(cls)
            # type's own method: a class that defines `__subclasses__` would be asked in the place of its metaclass.
            waiting.extend(type.__subclasses__(cls))
    return {cls for cls in found if cls.__module__.partition(".")[0] != _OWNER}


def _change(cls: type, noted: _Noted) -> tuple[tuple[type, ...], dict[str, Any]] | None:
    """Return the bases that a class has now, and the attributes that it has not had, or had otherwise."""
    now = dict(vars(cls))
    names = (now.keys() | noted.attributes.keys()) - _PYTHONS_OWN
    attributes = {
        name: now.get(name, _NO_ATTRIBUTE)
        for name in names
        if now.get(name, _NO_ATTRIBUTE) is not noted.attributes.get(name, _NO_ATTRIBUTE)
    }
    return (cls.__bases__, attributes) if attributes or cls.__bases__ != noted.bases else None


def _set(cls: type, name: str, value: Any) -> None:
    if value is _NO_ATTRIBUTE:
        delattr(cls, name)
    else:
        setattr(cls, name, value)
