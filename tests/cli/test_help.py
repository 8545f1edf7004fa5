"""``--help`` on one screen, ``--help KEY`` behind it, and a description of every key."""

import ast
import subprocess
import sys

import pytest

from lit_grpo.cli.errors.schema import Field, descriptions, read_schema
from lit_grpo.cli.help import Entry, default_in_words, entries, help_text, plain, type_in_words, wanted
from lit_grpo.cli.main import BAD_INPUT, DONE, main
from lit_grpo.errors import UserError
from tests.paths import ROOT

COMMANDS = ["fit", "validate", "test", "predict"]


def all_entries(command="fit"):
    return [one for one in entries(Entry("", Field(group=read_schema(command).fields))) if one.key]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_is_described_in_a_sentence(command):
    found = all_entries(command)
    assert len(found) > 300
    assert [one.key for one in found if len(plain(one.field.doc)) < 12] == []
    assert [one.key for one in found if not plain(one.field.doc).endswith((".", ":", "?", "!"))] == []
    # Markup is for the site.
    assert [one.key for one in found if "``" in plain(one.field.doc) or ":class:" in plain(one.field.doc)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_of_the_parser_is_in_the_help(command):
    from lit_grpo.cli.lightning_cli import build_parser

    known = {one.key for one in all_entries(command)}
    taken = {action.dest for action in build_parser(command)._actions}
    taken = {dest for dest in taken if dest not in ("help", "print_config") and not dest.endswith(".help")}
    assert taken - known == set()


def test_classes_describe_their_arguments():
    """Those that a configuration names by their path: the help of jsonargparse shows these descriptions."""
    import importlib
    import inspect

    from lightning.pytorch import Callback
    from lightning.pytorch.loggers import Logger

    from lit_grpo.data import PromptSource
    from lit_grpo.rewards import Reward

    missing, seen = [], 0
    for package in ("data", "rewards", "callbacks", "tracking", "report", "evaluation"):
        module = importlib.import_module(f"lit_grpo.{package}")
        for name in module.__all__:
            cls = getattr(module, name)
            if not inspect.isclass(cls) or not issubclass(cls, PromptSource | Reward | Callback | Logger):
                continue
            seen += 1
            bases = [base for base in cls.__mro__ if base.__module__.startswith("lit_grpo")]
            docs: dict[str, str] = {}
            for base in reversed(bases):
                docs |= descriptions(inspect.cleandoc(base.__doc__ or "")) | below_fields(base)
            parameters = inspect.signature(cls.__init__).parameters.values()
            missing += [
                f"{name}.{one.name}"
                for one in parameters
                if one.name != "self"
                and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
                and not docs.get(one.name)
            ]
    assert missing == []
    assert seen > 40


def below_fields(cls):
    import inspect
    import itertools
    import textwrap

    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):
        return {}
    assert isinstance(node, ast.ClassDef)
    return {
        before.target.id: str(after.value.value)
        for before, after in itertools.pairwise(node.body)
        if isinstance(before, ast.AnnAssign)
        and isinstance(before.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_the_overview_is_one_screen(command):
    lines = help_text(command, "", 80).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert "  --help KEY" in "\n".join(lines)


def test_the_programs_help_is_one_screen(capsys):
    assert main(["--help"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from lit_grpo.cli.main import main; main(['fit', '--help']); main(['fit', '--help', 'data']);"
        "print([m for m in ('torch', 'lightning', 'transformers', 'jsonargparse') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_a_key_shows_its_type_default_and_description(capsys):
    assert main(["fit", "--help", "model.optimizer.lr"]) == DONE
    assert (
        capsys.readouterr().out
        == "model.optimizer.lr  (number in (0, 1000]; default: 1e-06)\n    Peak learning rate.\n"
    )
    assert wanted(["--help=model.optimizer.lr"]) == "model.optimizer.lr"
    assert wanted(["--data.rollouts", "3", "--help", "--model.optimizer.lr", "1"]) == ""
    assert wanted(["--data.rollouts", "3"]) is None
    assert wanted([]) is None


def test_a_group_lists_what_is_below_it():
    text = help_text("fit", "model.critic", 80)
    assert "model.critic.warmup_rollouts" in text or "model.critic.optimizer" in text
    text = help_text("fit", "trainer", 80)
    # The default here, and not Lightning's.
    assert "trainer.max_epochs  (whole number or null; default: 1)" in text
    assert "Default: " not in text


def test_a_class_points_to_its_arguments():
    text = help_text("fit", "data.rewards", 80)
    assert "--data.rewards.help CLASS" in text
    assert "lit_grpo.rewards.MathReward" in text
    assert "lit_grpo.callbacks.HealthMonitor" in help_text("fit", "trainer.callbacks", 80)


def test_all_keys_on_one_page():
    text = help_text("fit", "all", 80)
    assert all(f"{one.key}  (" in text for one in all_entries())


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("data.engine.kl_coef", "--help model.objective.kl_coef"),
        ("objektive", "--help model.objective"),
        ("lr", "--help model.optimizer.lr"),
        ("data.prompts.path", "--data.prompts.help CLASS"),
        ("zzzzzz", "lit-grpo fit --help lists the keys"),
    ],
)
def test_an_unknown_key_is_one_screen_with_what_is_near(key, remedy, capsys):
    with pytest.raises(UserError) as caught:
        help_text("fit", key)
    assert remedy in str(caught.value.remedy)
    assert main(["fit", "--help", key]) == BAD_INPUT
    assert len(capsys.readouterr().err.splitlines()) < 10


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        ("int | None", "whole number or null"),
        ("Annotated[float, Bound(above=0, most=1)]", "number in (0, 1]"),
        ("Annotated[int | Literal['auto'], Bound(least=1, most=64)]", "whole number in [1, 64] or auto"),
        ("Optional[Union[str, Path]]", "text or Path or null"),
        ("dict[str, Any]", "mapping"),
        ("tuple[int, ...]", "list of whole number"),
    ],
)
def test_types_in_words(annotation, words):
    assert type_in_words(Field(annotation=ast.parse(annotation, mode="eval").body)) == words


def test_defaults_are_those_of_the_parser():
    from lit_grpo.cli.lightning_cli import build_parser

    defaults = build_parser("fit").get_defaults()
    checked = 0
    for one in all_entries():
        if one.field.group or one.key in ("config", "trainer.logger") or default_in_words(one) is None:
            continue
        try:
            value = defaults[one.key]
        except KeyError:
            continue  # below what may be left out
        if isinstance(value, bool | int | float | str) or value is None:
            words = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            assert default_in_words(one) == words, one.key
            checked += 1
    assert checked > 150


def test_jsonargparses_help_of_a_class_still_works(capsys):
    assert main(["fit", "--data.rewards.help", "lit_grpo.rewards.ExactMatch"]) == DONE
    assert "ignore_case" in capsys.readouterr().out
