"""What an import path leads to, and what is said where it leads nowhere; names that are imported when asked for."""

import sys
from collections import OrderedDict
from types import ModuleType

import pytest

from lit_grpo.errors import UserError
from lit_grpo.utils.imports import import_by_path, lazy_attributes


def test_the_value_at_a_path():
    assert import_by_path("collections.OrderedDict") is OrderedDict
    assert import_by_path("os.path.sep") == "/"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("OrderedDict", "is no import path"),
        ("", "is no import path"),
        (".OrderedDict", "is no import path"),
        ("collections.", "is no import path"),
        ("my collections.OrderedDict", "is no import path"),
        ("no_such_module.name", "cannot be imported: No module named 'no_such_module'"),
        ("collections.OrderedDct", "did you mean collections.OrderedDict?"),
        ("collections.xyzzy", "collections has no xyzzy"),
    ],
)
def test_a_path_that_leads_nowhere_is_explained(path, said):
    with pytest.raises(UserError) as caught:
        import_by_path(path, "model.part", remedy="write it so")
    assert said in str(caught.value)
    assert "where: model.part" in str(caught.value)
    assert ("remedy: write it so" in str(caught.value)) == (not path.startswith("collections.") or path.endswith("."))


def test_what_a_module_has_is_listed_where_nothing_is_near(tmp_path, monkeypatch):
    (tmp_path / "few_names.py").write_text("import math\n\n\ndef right(text):\n    return 1.0\n\n\ndef _own(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as caught:
        import_by_path("few_names.zebra")
    assert caught.value.remedy == "it has right"


def test_a_module_that_fails_by_itself_is_told_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "broken_on_import.py").write_text("\n1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="ZeroDivisionError: division by zero") as caught:
        import_by_path("broken_on_import.name")
    assert caught.value.where == f"{tmp_path / 'broken_on_import.py'}:2"
    assert isinstance(caught.value.__cause__, ZeroDivisionError), "the traceback is kept for LIT_GRPO_DEBUG=1"


def test_names_are_imported_when_first_asked_for(tmp_path, monkeypatch):
    folder = tmp_path / "lazy_package"
    folder.mkdir()
    (folder / "heavy.py").write_text("value = object()")
    (folder / "__init__.py").write_text(
        "from lit_grpo.utils.imports import lazy_attributes\n"
        "__getattr__ = lazy_attributes(__name__, {'value': 'heavy', 'missing': 'heavy'})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import lazy_package

    assert isinstance(lazy_package, ModuleType)
    assert "lazy_package.heavy" not in sys.modules
    value = lazy_package.value
    assert value is lazy_package.value is sys.modules["lazy_package.heavy"].value
    with pytest.raises(AttributeError, match="'lazy_package' has no attribute 'other'"):
        _ = lazy_package.other
    with pytest.raises(AttributeError, match="missing"):
        _ = lazy_package.missing
    with pytest.raises(AttributeError, match="no attribute"):
        lazy_attributes("collections", {})("x")


def test_the_line_of_an_error_is_the_persons_own_and_not_that_of_a_library_under_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reads_json.py").write_text("import json\n\ndata = json.loads('no json')\n")
    with pytest.raises(UserError) as raised:
        import_by_path("reads_json.Mine")
    assert raised.value.where == f"{tmp_path}/reads_json.py:3"
