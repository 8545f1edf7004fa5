"""The keys and choices of a command's configuration, read from the source text of the classes that take them.

Importing LitGRPO takes many seconds, since Lightning and torch come with it; a misspelt key need not wait for that.
Names, annotations and fields are taken from the syntax trees of the very signatures that jsonargparse inspects later.
What they do not show is left open, and jsonargparse has the last word on everything.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CLASSES = {
    "trainer": ("lightning.pytorch", "Trainer"),
    "model": ("lit_grpo.module", "LitGRPO"),
    "data": ("lit_grpo.datamodule", "RolloutDataModule"),
    "checkpoint": ("lit_grpo.callbacks", "RolloutCheckpoint"),
    "completions": ("lit_grpo.tracking.completions", "CompletionTable"),
}
"""Module and name of the class whose arguments stand below each top-level key."""
PLAIN_KEYS = {
    "config": "YAML file with any of these keys. Given several times, files are put on top of each other, and later "
    "ones win.",
    "seed_everything": "Seed of all that is drawn by chance. A run with the same seed and settings repeats itself; "
    "`true` draws a seed.",
    "monitors": "Whether a fit without monitors of its own in `trainer.callbacks` gets all of them, which then say "
    "what goes wrong and stop nothing (a HealthMonitor with `actions: {critical: log}`).",
}
"""Description of the top-level keys that hold one value: those that LightningCLI adds, and ours."""


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
    doc: str = ""
    """Description, as the docstring has it."""
    annotation: ast.expr | None = None
    """Type, as the source text has it."""
    default: ast.expr | None = None
    """Default, as the source text has it; None: there is none."""
    takes_class: bool = False
    """Whether a class may stand there, whose arguments only the configuration decides."""


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
    fields = {name: Field(doc=doc) for name, doc in PLAIN_KEYS.items()}
    for key, (module, name) in CLASSES.items():
        where, cls = sources.find_class(module, name)
        doc = ast.get_docstring(cls) or ast.get_docstring(sources.method(cls, "__init__")) or ""
        doc = doc.partition("\n\n")[0]
        fields[key] = Field(group=sources.arguments(where, cls), doc=doc)
    _, trainer = sources.find_class(*CLASSES["trainer"])
    skipped = sources.literal_of(*sources.find_class("lightning.pytorch.cli", "LightningCLI"), "subcommands")
    docs = descriptions(ast.get_docstring(sources.method(trainer, command)) or "")
    for name, annotation, default in sources.signature(trainer, command):
        if name not in skipped[command]:
            fields[name] = Field(doc=docs.get(name, ""), annotation=annotation, default=default)
    return Schema(fields)


def subclasses(names: Collection[str]) -> list[str]:
    """Return the import paths of the classes that packages of lit-grpo export and that derive from one of these."""
    bases: dict[str, set[str]] = {}
    home: dict[str, tuple[str, ast.ClassDef]] = {}
    package = Path(__file__).parents[2]
    # pathlib does not follow links to folders, such as that to callbacks/.
    for path in sorted({*package.rglob("*.py"), *(package / "callbacks").rglob("*.py")}):
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for node in _tree(module):
            if isinstance(node, ast.ClassDef) and node.bases:
                bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                home[node.name] = module, node
    known, more = set(names), set(names)
    while more:
        more = {name for name, of in bases.items() if of & more} - known
        known |= more
    paths = [_Sources().shortest_path(*home[name]) for name in known - set(names)]
    return sorted(path for path in paths if path.count(".") == 2)


@cache
def trainer_defaults() -> dict[str, Any]:
    """Return the Trainer's defaults that the command line has in the place of Lightning's."""
    for node in _tree("lit_grpo.cli.lightning_cli"):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TRAINER_DEFAULTS" and node.value:
            found: dict[str, Any] = ast.literal_eval(node.value)
            return found
    raise NotReadableError("TRAINER_DEFAULTS")


def descriptions(docstring: str) -> dict[str, str]:
    """Return what a docstring says of each argument or attribute, by name."""
    found: dict[str, list[str]] = {}
    name, indent = "", -1
    for line in docstring.splitlines():
        depth = len(line) - len(line.lstrip())
        if re.fullmatch(r"(Args|Attributes):", line):
            indent = -2
        elif line.strip() and depth == 0:
            indent = -1
        elif indent != -1 and line.strip():
            # The first entry says how deep entries stand.
            indent = depth if indent == -2 else indent
            entry = re.match(r"\s+\*{0,2}(\w+)(?: \([^)]*\))?: ?(.*)", line) if depth == indent else None
            if entry is not None:
                name = entry[1]
                found[name] = [entry[2]]
            elif name:
                found[name].append(line.strip())
    return {name: " ".join(" ".join(lines).split()) for name, lines in found.items()}


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

    def signature(self, cls: ast.ClassDef, method: str) -> list[tuple[str, ast.expr | None, ast.expr | None]]:
        """List (name, annotation, default) of a method's arguments; it must take neither *args nor **kwargs."""
        arguments = self.method(cls, method).args
        if arguments.kwarg is not None or arguments.vararg is not None:
            raise NotReadableError(f"{cls.name}.{method}")
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
        found = [*zip(positional, defaults, strict=True)][1:]
        found += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return [(a.arg, a.annotation, default) for a, default in found]

    def arguments(self, module: str, cls: ast.ClassDef) -> dict[str, Field]:
        """Return the fields of a class's constructor by name."""
        docs = descriptions(ast.get_docstring(cls) or "")
        if _is_dataclass(cls):
            found = self._dataclass_fields(module, cls)
            docs |= _below_fields(cls)
        else:
            found = self.signature(cls, "__init__")
            docs = descriptions(ast.get_docstring(self.method(cls, "__init__")) or "") | docs
        return {
            name: replace(
                self.field(module, annotation),
                doc=docs.get(name, ""),
                annotation=annotation,
                default=self._value(module, default),
                takes_class=self._takes_class(module, annotation),
            )
            for name, annotation, default in found
        }

    def _dataclass_fields(self, module: str, cls: ast.ClassDef) -> list[tuple[str, ast.expr | None, ast.expr | None]]:
        # Inherited fields would have to be looked for in the bases, in the right order.
        if cls.bases:
            raise NotReadableError(f"{module}.{cls.name} inherits fields")
        return [
            (node.target.id, node.annotation, node.value)
            for node in cls.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]

    def _value(self, module: str, default: ast.expr | None) -> ast.expr | None:
        """Return a default, or the value that a name of the module stands for there."""
        found = self.find(module, default.id) if isinstance(default, ast.Name) else None
        return found[1].value if found is not None and isinstance(found[1], ast.Assign) else default

    def _takes_class(self, module: str, annotation: ast.expr | None) -> bool:
        names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)] if annotation else []
        found = [self.find(module, name) for name in names]
        return any(one is not None and isinstance(one[1], ast.ClassDef) and not _is_dataclass(one[1]) for one in found)

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
            return Field(optional=OptionalDataclass(self.shortest_path(where, node), inner))
        return Field(group=inner)

    def shortest_path(self, module: str, cls: ast.ClassDef) -> str:
        """Return the shortest import path of a class, as jsonargparse names it in its messages."""
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


def _below_fields(cls: ast.ClassDef) -> dict[str, str]:
    """Return the docstrings that stand below the fields of a dataclass."""
    found = {}
    for node, following in itertools.pairwise(cls.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            text = following.value.value if isinstance(following.value, ast.Constant) else None
            if isinstance(text, str):
                found[node.target.id] = " ".join(text.split())
    return found


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
