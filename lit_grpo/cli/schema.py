"""What a command's configuration may hold, read from the source text of the classes that the parser will look at.

Importing LitGRPO takes many seconds, since Lightning and torch come with it; a misspelt key need not wait for that.
Names, annotations and fields are taken from the syntax trees of the very signatures that the parser reads later. What
cannot be told from there is left open, and the parser has the last word on everything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PARTS = {
    "trainer": ("lightning.pytorch", "Trainer"),
    "model": ("lit_grpo.module", "LitGRPO"),
    "data": ("lit_grpo.datamodule", "RolloutDataModule"),
    "checkpoint": ("lit_grpo.callbacks", "RolloutCheckpoint"),
}
"""Top-level key -> where the class is imported from whose arguments stand below it."""
OWN = ("config", "seed_everything")
"""Top-level keys of LightningCLI itself."""


@dataclass(frozen=True)
class Part:
    """A dataclass that may be left out, ``CriticConfig | None``."""

    class_path: str
    fields: dict[str, Field]


@dataclass(frozen=True)
class Field:
    """One argument. Both empty: anything may stand there, as far as can be told."""

    choices: tuple[str, ...] = ()
    """The words that it may be, if it may be nothing else (but null)."""
    part: Part | None = None
    group: dict[str, Field] = field(default_factory=dict)
    """Fields of a dataclass that is always there, ``PolicyConfig``."""


@dataclass(frozen=True)
class Schema:
    """Top-level keys of a command."""

    fields: dict[str, Field]

    def leaves(self) -> dict[str, Field]:
        """Dotted key -> field, of all that stand in no group; what is inside an optional part is not listed."""
        return dict(_leaves(self.fields, ""))


def _leaves(fields: dict[str, Field], prefix: str) -> Iterator[tuple[str, Field]]:
    for name, one in fields.items():
        if one.group:
            yield from _leaves(one.group, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", one


class NotReadableError(Exception):
    """The source text is not there, or not of the kind understood here."""


def read_schema(command: str) -> Schema:
    """The keys of fit, validate, test or predict.

    Raises:
        NotReadableError: it cannot be told from the source text; then only the parser knows.
    """
    sources = _Sources()
    fields = {name: Field() for name in OWN}
    for key, (module, name) in PARTS.items():
        fields[key] = Field(group=sources.arguments(*sources.find_class(module, name)))
    _, trainer = sources.find_class(*PARTS["trainer"])
    skipped = sources.literal_of(*sources.find_class("lightning.pytorch.cli", "LightningCLI"), "subcommands")
    for name, _ in sources.signature(trainer, command):
        if name not in skipped[command]:
            fields[name] = Field()
    return Schema(fields)


class _Sources:
    """What is defined in modules, none of which is imported."""

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """(module, statement) that defines a name, wherever it is imported from; None if it is not plain to see."""
        try:
            statements = _tree(module)
        except NotReadableError:
            return None
        for node in statements:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(node.module, alias.name)
        return None

    def find_class(self, module: str, name: str) -> tuple[str, ast.ClassDef]:
        found = self.find(module, name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            raise NotReadableError(f"{module}.{name}")
        return found[0], found[1]

    def literal_of(self, module: str, cls: ast.ClassDef, method: str) -> dict[str, set[str]]:
        """What a method returns that only returns a literal."""
        body = self.method(cls, method).body
        value = next((node.value for node in body if isinstance(node, ast.Return) and node.value is not None), None)
        if value is None:
            raise NotReadableError(f"{module}.{method}")
        found: dict[str, set[str]] = ast.literal_eval(value)
        return found

    def method(self, cls: ast.ClassDef, name: str) -> ast.FunctionDef:
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        raise NotReadableError(f"{cls.name}.{name}")

    def signature(self, cls: ast.ClassDef, method: str) -> list[tuple[str, ast.expr | None]]:
        """(name, annotation) of the arguments of a method that takes no others."""
        arguments = self.method(cls, method).args
        if arguments.kwarg is not None or arguments.vararg is not None:
            raise NotReadableError(f"{cls.name}.{method}")
        plain = [*arguments.posonlyargs, *arguments.args][1:]
        return [(a.arg, a.annotation) for a in [*plain, *arguments.kwonlyargs]]

    def arguments(self, module: str, cls: ast.ClassDef) -> dict[str, Field]:
        """The constructor's."""
        found = self._dataclass_fields(module, cls) if _is_dataclass(cls) else self.signature(cls, "__init__")
        return {name: self.field(module, annotation) for name, annotation in found}

    def _dataclass_fields(self, module: str, cls: ast.ClassDef) -> list[tuple[str, ast.expr | None]]:
        if cls.bases:
            raise NotReadableError(f"{module}.{cls.name} inherits fields")
        return [
            (node.target.id, node.annotation)
            for node in cls.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]

    def field(self, module: str, annotation: ast.expr | None) -> Field:
        """What an annotation allows."""
        kinds = [kind for kind in _alternatives(annotation) if not _is_none(kind)]
        if len(kinds) != 1:
            return Field()
        optional, kind = len(kinds) < len(_alternatives(annotation)), kinds[0]
        if isinstance(kind, ast.Subscript) and _name(kind.value) == "Literal":
            values = [getattr(node, "value", None) for node in _elements(kind.slice)]
            words = tuple(value for value in values if isinstance(value, str))
            return Field(choices=words if len(words) == len(values) else ())
        if not isinstance(kind, ast.Name) or (found := self.find(module, kind.id)) is None:
            return Field()
        where, node = found
        if isinstance(node, ast.Assign):
            return (
                self.field(where, node.value) if not optional else Field(choices=self.field(where, node.value).choices)
            )
        if not isinstance(node, ast.ClassDef) or not _is_dataclass(node):
            return Field()
        try:
            inner = self.arguments(where, node)
        except NotReadableError:
            return Field()
        return Field(part=Part(self._shortest(where, node), inner)) if optional else Field(group=inner)

    def _shortest(self, module: str, cls: ast.ClassDef) -> str:
        """The shortest import path of a class."""
        parts = module.split(".")
        packages = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return next(f"{p}.{cls.name}" for p in packages if (found := self.find(p, cls.name)) and found[1] is cls)


@cache
def _tree(module: str) -> list[ast.stmt]:
    """The statements of a module."""
    first, *others = module.split(".")
    spec = find_spec(first)  # of a top-level package: runs nothing
    if spec is None or not spec.submodule_search_locations:
        raise NotReadableError(module)
    base = Path(next(iter(spec.submodule_search_locations))).joinpath(*others)
    paths = [path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()]
    if not paths:
        raise NotReadableError(module)
    return list(_top_level(ast.parse(paths[0].read_text(encoding="utf-8")).body))


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, with those of ``if TYPE_CHECKING:``."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _top_level(node.body)
        else:
            yield node


def _is_dataclass(cls: ast.ClassDef) -> bool:
    return any(_name(d.func if isinstance(d, ast.Call) else d) == "dataclass" for d in cls.decorator_list)


def _alternatives(annotation: ast.expr | None) -> list[ast.expr]:
    """The types of a union."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return [*_alternatives(annotation.left), *_alternatives(annotation.right)]
    return [] if annotation is None else [annotation]


def _elements(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
