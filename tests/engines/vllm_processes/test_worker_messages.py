"""Messages that the process of an engine reads: code that came with a model, and what it cannot read at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lit_grpo.engines.vllm_processes import group
from tests.paths import ROOT

# A tokenizer of a class that this process knows by code of a model, which is then no longer found.
SCRIPT = """
import sys
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
import threading
from lit_grpo.engines.vllm_processes.worker import Worker

folder, told = sys.argv[1], sys.argv[2] == "told"
sys.path.insert(0, folder)
from transformers_modules.own import Tokenizer
message = ForkingPickler.dumps(("build", "path", {}, Tokenizer()))
sys.path.remove(folder)
for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
    del sys.modules[name]
sys.path_importer_cache.clear()

class Reader(Worker):
    def _do_build(self, path, options, tokenizer):
        self._send("ready", tokenizer.greeting)

ours, theirs = Pipe()
reader = Reader(theirs)
if told:
    ours.send(("code", folder))
ours.send_bytes(message)
threading.Thread(target=reader.run, daemon=True).start()
print(ours.recv(), flush=True)
ours.send(("close",))
threading.Event().wait(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "transformers_modules"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "own.py").write_text("class Tokenizer:\n    greeting = 'of my own'\n")
    return tmp_path


def read(folder: Path, told: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), told]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_tokenizer_of_a_models_own_code_is_read(folder: Path) -> None:
    done = read(folder, "told")
    assert done.returncode == 0, done.stderr
    assert "('ready', 'of my own')" in done.stdout


def test_a_message_that_cannot_be_read_ends_the_process(folder: Path) -> None:
    """Whoever sent it would wait for the answer until the longest start is over."""
    done = read(folder, "nothing")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'transformers_modules'" in done.stderr


def test_the_folder_of_models_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers leaves it: the modules are known, and the package around them is not."""
    from transformers import dynamic_module_utils

    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    assert group._code_of_models() is None
    monkeypatch.setitem(sys.modules, "transformers_modules.own", ModuleType("transformers_modules.own"))
    assert group._code_of_models() == str(dynamic_module_utils.HF_MODULES_CACHE)
