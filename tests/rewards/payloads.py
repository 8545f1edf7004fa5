"""Completions that try to be run: in every form in which some reward looks for an answer."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from pathlib import Path


class _Pickled:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.system, (self.command,)


def payloads(marker: Path) -> Iterator[str]:
    """Yield texts each of which, run by whatever it is meant for, makes a file ``marker``."""
    command = f"touch {marker}"
    opened = f"open('{marker}', 'w')"
    yield f"__import__('os').system('{command}')"
    yield f"[__import__('os').system('{command}')]"
    yield f"['a', {opened}.close()]"
    yield f"{opened}.close() or 4"
    yield f"4 + {opened}.write('x')"
    yield f"(lambda: {opened})()"
    yield f'eval("{opened}")'
    yield f'sqrt("{opened}")'
    yield f'sympify("{opened}")'
    yield f"Symbol('x').__class__.__init__.__globals__['__builtins__']['open']('{marker}', 'w')"
    yield f'().__class__.__base__.__subclasses__()[0].__init__; exec("{opened}")'
    yield f"{{open('{marker}', 'w')}}"
    yield f"{{{{ cycler.__init__.__globals__.os.popen('{command}').read() }}}}"
    yield f"!!python/object/apply:os.system ['{command}']"
    yield base64.b64encode(pickle.dumps(_Pickled(command))).decode()
    yield pickle.dumps(_Pickled(command)).decode("latin-1")
    yield rf"\immediate\write18{{{command}}}"
    yield rf"\input{{|{command}}}"
    yield f"$({command})"
    yield f"`{command}`"
    yield f"4; {command}"
    yield f"import os\nos.system('{command}')\n{opened}"
    yield f"import subprocess; subprocess.run({command.split()!r})"


def wrapped(payload: str) -> Iterator[str]:
    """Yield a payload in each form in which a reward finds an answer, or a program."""
    yield payload
    yield f"<reasoning>r</reasoning><answer>{payload}</answer>"
    yield f"So \\boxed{{{payload}}}"
    yield f"Therefore\n#### {payload}"
    yield f"The answer is {payload}"
    yield f"```python\n{payload}\n```"
    yield f"```\n{payload}\n```\n<answer>\n```python\n{payload}\n```\n</answer>"
    yield f"<answer>\\frac{{{payload}}}{{2}} = x^2</answer>"
