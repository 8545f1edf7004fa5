"""The keys and choices of a command's configuration, read from the source text of the classes that take them.

Importing LitGRPO takes many seconds, since Lightning and torch come with it; a misspelt key need not wait for that.
Names, annotations and fields are taken from the syntax trees of the very signatures that jsonargparse inspects later.
What they do not show is left open, and jsonargparse has the last word on everything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

CLASSES = {
    "trainer": ("lightning.pytorch", "Trainer"),
    "model": ("lit_grpo.module", "LitGRPO"),
    "data": ("lit_grpo.datamodule", "RolloutDataModule"),
    "checkpoint": ("lit_grpo.callbacks", "RolloutCheckpoint"),
    "completions": ("lit_grpo.tracking.completions", "CompletionTable"),
}
"""Module and name of the class whose arguments stand below each top-level key."""
PLAIN_KEYS = ("config", "seed_everything", "monitors")
"""Top-level keys that hold one value: those that LightningCLI adds, and ours."""


@dataclass(frozen=True)
class OptionalDataclass:
    """A dataclass that may be left out, such as ``CriticConfig | None``."""

    class_path: str
    fields: dict[str, Field]


@dataclass(frozen=True)
class Field:
    """One argument of a class; with nothing set, its annotation allows anything as far as can be read."""

    choices: tuple[str, ...] = ()
    """The only words that may stand there, besides null."""
    optional: OptionalDataclass | None = None
    group: dict[str, Field] = field(default_factory=dict)
    """Fields of a dataclass that is always there, such as ``PolicyConfig``."""


@dataclass(frozen=True)
class Schema:
    """Schema of the configuration that a command takes, by top-level key."""

    fields: dict[str, Field]

    def leaves(self) -> dict[str, Field]:
        """Map each dotted key that is no group to its field; fields of optional dataclasses are not listed."""
        return dict(_leaves(self.fields, ""))


def _leaves(fields: dict[str, Field], prefix: str) -> Iterator[tuple[str, Field]]:
    for name, argument in fields.items():
        if argument.group:
            yield from _leaves(argument.group, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", argument


class NotReadableError(Exception):
    """Error for source text that is missing, or not of the kind understood here."""


def read_schema(command: str) -> Schema:
    """Read the configuration keys of fit, validate, test or predict.

    Raises:
        NotReadableError: the source text does not show them; then only jsonargparse can tell.
    """
    sources = _Sources()
    fields = {name: Field() for name in PLAIN_KEYS}
    for key, (module, name) in CLASSES.items():
        fields[key] = Field(group=sources.arguments(*sources.find_class(module, name)))
    _, trainer = sources.find_class(*CLASSES["trainer"])
    skipped = sources.literal_of(*sources.find_class("lightning.pytorch.cli", "LightningCLI"), "subcommands")
    for name, _ in sources.signature(trainer, command):
        if name not in skipped[command]:
            fields[name] = Field()
    return Schema(fields)


class _Sources:
    """Reader of definitions in modules, none of which it imports."""

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Return (module, statement) that defines a name, following imports; None if no plain statement does."""
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
        """Evaluate the literal that a method of a class returns."""
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
        """List (name, annotation) of a method's arguments; it must take neither *args nor **kwargs."""
        arguments = self.method(cls, method).args
        if arguments.kwarg is not None or arguments.vararg is not None:
            raise NotReadableError(f"{cls.name}.{method}")
        positional = [*arguments.posonlyargs, *arguments.args][1:]
        return [(a.arg, a.annotation) for a in [*positional, *arguments.kwonlyargs]]

    def arguments(self, module: str, cls: ast.ClassDef) -> dict[str, Field]:
        """Return the fields of a class's constructor by name."""
        found = self._dataclass_fields(module, cls) if _is_dataclass(cls) else self.signature(cls, "__init__")
        return {name: self.field(module, annotation) for name, annotation in found}

    def _dataclass_fields(self, module: str, cls: ast.ClassDef) -> list[tuple[str, ast.expr | None]]:
        # Inherited fields would have to be looked for in the bases, in the right order.
        if cls.bases:
            raise NotReadableError(f"{module}.{cls.name} inherits fields")
        return [
            (node.target.id, node.annotation)
            for node in cls.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]

    def field(self, module: str, annotation: ast.expr | None) -> Field:
        """Return the field that an annotation describes."""
        types = [node for node in _alternatives(annotation) if not _is_none(node)]
        # A union may be satisfied in several ways, so nothing can be refused.
        if len(types) != 1:
            return Field()
        optional, only = len(types) < len(_alternatives(annotation)), types[0]
        if isinstance(only, ast.Subscript) and _name(only.value) == "Literal":
            values = [getattr(node, "value", None) for node in _elements(only.slice)]
            words = tuple(value for value in values if isinstance(value, str))
            return Field(choices=words if len(words) == len(values) else ())
        if not isinstance(only, ast.Name) or (found := self.find(module, only.id)) is None:
            return Field()
        where, node = found
        if isinstance(node, ast.Assign):
            # A type alias, such as `Backend = Literal[...]`.
            alias = self.field(where, node.value)
            return Field(choices=alias.choices) if optional else alias
        if not isinstance(node, ast.ClassDef) or not _is_dataclass(node):
            return Field()
        try:
            inner = self.arguments(where, node)
        except NotReadableError:
            return Field()
        if optional:
            return Field(optional=OptionalDataclass(self._shortest_path(where, node), inner))
        return Field(group=inner)

    def _shortest_path(self, module: str, cls: ast.ClassDef) -> str:
        # As jsonargparse names a class in its messages.
        parts = module.split(".")
        packages = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
        return next(f"{p}.{cls.name}" for p in packages if (found := self.find(p, cls.name)) and found[1] is cls)


@cache
def _tree(module: str) -> list[ast.stmt]:
    """Parse the top-level statements of a module."""
    first, *others = module.split(".")
    # Only of the top-level package: find_spec of a submodule would import its parents.
    spec = find_spec(first)
    if spec is None or not spec.submodule_search_locations:
        raise NotReadableError(module)
    base = Path(next(iter(spec.submodule_search_locations))).joinpath(*others)
    paths = [path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()]
    if not paths:
        raise NotReadableError(module)
    return list(_top_level(ast.parse(paths[0].read_text(encoding="utf-8")).body))


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, with those under ``if TYPE_CHECKING:``."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _top_level(node.body)
        else:
            yield node


def _is_dataclass(cls: ast.ClassDef) -> bool:
    return any(_name(d.func if isinstance(d, ast.Call) else d) == "dataclass" for d in cls.decorator_list)


def _alternatives(annotation: ast.expr | None) -> list[ast.expr]:
    """List the types of a union."""
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return [*_alternatives(annotation.left), *_alternatives(annotation.right)]
    return [] if annotation is None else [annotation]


def _elements(node: ast.expr) -> list[ast.expr]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
