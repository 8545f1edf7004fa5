# ruff: noqa: E501 - programs in one line each
"""Programs run against tests: right ones pass, and no other can fool, leave or hold up the sandbox."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_grpo.errors import UserError
from lit_grpo.rewards import CodeReward, RewardError, score_all
from lit_grpo.rewards.code.reward import program_in
from lit_grpo.rewards.code.roles import unknown_names
from lit_grpo.rewards.code.values import pack, read, unpack, write
from lit_grpo.rewards.isolation import sandbox
from lit_grpo.types import Completion, Prompt, RewardInput
from tests.rewards.code.code_attacks import ESCAPES, FOOLING, HOLDING_UP, TESTS
from tests.waiting import PATIENCE, wait_until

MISSING = sandbox.check()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no sandbox here: {MISSING}")
LIMIT = 2.0


@pytest.fixture(scope="module")
def reward():
    os.environ["A_SECRET"] = "x"
    reward = CodeReward(limit=20.0, workers=2)
    yield reward
    reward.close()
    del os.environ["A_SECRET"]


@pytest.fixture(scope="module")
def impatient():
    reward = CodeReward(limit=LIMIT, memory=256, workers=2)
    yield reward
    reward.close()


def item(program, fenced=True, **extra):
    text = f"Here it is:\n```python\n{program}\n```\nDone." if fenced else program
    return RewardInput(Prompt("p", "q", (1,), None, "", extra), Completion(0, 0, (1,), (0.0,), "stop", 0), text)


RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "asserts": ("def add(a, b): return a + b", {"tests": TESTS}),
    "one text": ("def add(a, b): return a + b", {"tests": "\n".join(TESTS)}),
    "entry point": ("def add(a, b): return a + b", {"tests": "def check(f):\n assert f(2, 2) == 4", "entry_point": "add"}),
    "pytest": ("def add(a, b): return a + b", {"tests": "def test_it():\n assert add(2, 2) == 4"}),
    "unittest": (
        "def add(a, b): return a + b",
        {"tests": "import unittest\nclass T(unittest.TestCase):\n def test_it(self): self.assertEqual(add(1, 1), 2)"},
    ),
    "values": (
        "def same(x): return x",
        {"tests": "for x in (None, True, 1, 10 ** 5000, -0.5, 1e300, 'ü\\ud800', b'\\x00', 2j, [1, [2]], (1, (2,)), {1},"
                  " frozenset({2}), {(1, 2): [3]}, range(0, 9, 3)):\n assert same(x) == x and type(same(x)) is type(x)"},
    ),
    "in place": ("def f(x, d): x.sort(); d['n'] = 1", {"tests": "l, d = [3, 1, 2], {}\nf(l, d)\nassert (l, d) == ([1, 2, 3], {'n': 1})"}),
    "generator": ("def f(n):\n for i in range(n): yield i", {"tests": "assert list(f(3)) == [0, 1, 2]"}),
    "class": (
        "class Stack:\n def __init__(self): self.x = []\n def push(self, v): self.x.append(v)\n def pop(self): return self.x.pop()\n"
        " @property\n def size(self): return len(self.x)",
        {"tests": "s = Stack()\ns.push(4)\nassert s.size == 1\nassert s.pop() == 4\ntry:\n s.pop()\nexcept IndexError: pass\n"
                  "else: assert False"},
    ),
    "exceptions": ("def f(): raise ValueError", {"tests": "try:\n f()\n assert False\nexcept ValueError: pass"}),
    "library": ("import collections, heapq, math, re, itertools, functools, json, decimal, threading\ndef f(): return math.gcd(4, 6)",
                {"tests": "assert f() == 2"}),
    "threads": ("import threading\ndef f():\n x = []\n t = threading.Thread(target=x.append, args=(1,)); t.start(); t.join(); return x",
                {"tests": "assert f() == [1]"}),
    "script": ("n = int(input())\nprint(n * 2)  ", {"cases": [{"input": "3\n", "output": "6"}, {"input": "4", "output": "8\n\n"}]}),
    "script that exits": ("import sys\nprint(sum(map(int, sys.stdin)))\nsys.exit(0)", {"cases": [{"input": "1\n2\n", "output": "3"}]}),
    "much input": ("import sys\nprint(len(sys.stdin.read()))", {"cases": [{"input": "x" * 500_000, "output": "500000"}]}),
    "its output ends before it does": ("import os, time\nprint(3, flush=True)\nos.close(1)\ntime.sleep(0.3)",
                                       {"cases": [{"input": "", "output": "3"}]}),
    "main": ("if __name__ == '__main__':\n print('a  \\nb')", {"cases": [{"input": "", "output": "a\nb"}]}),
}  # fmt: skip

WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "wrong": ("def add(a, b): return a - b", {"tests": TESTS}),
    "half right": ("def add(a, b): return 3", {"tests": TESTS}),
    "unittest": (
        "def add(a, b): return 0",
        {"tests": "import unittest\nclass T(unittest.TestCase):\n def test_it(self): self.assertEqual(add(1, 1), 2)"},
    ),
    "tuple for list": ("def f(): return (1, 2)", {"tests": "assert f() == [1, 2]"}),
    "no exception": ("def f(): pass", {"tests": "try:\n f()\n assert False\nexcept ValueError: pass"}),
    "wrong output": ("print(5)", {"cases": [{"input": "", "output": "6"}]}),
    "more output": ("print(6)\nprint(6)", {"cases": [{"input": "", "output": "6"}]}),
    "right output and a failure": ("print(6)\nraise ValueError", {"cases": [{"input": "", "output": "6"}]}),
    "right output and exit code 1": ("import sys\nprint(6)\nsys.exit(1)", {"cases": [{"input": "", "output": "6"}]}),
    "one case of two": ("print(6)", {"cases": [{"input": "", "output": "6"}, {"input": "", "output": "7"}]}),
}


def test_right_programs_pass_and_wrong_ones_do_not(reward):
    scores = reward.score(
        [item(program, **extra) for program, extra in (RIGHT | {f"not {k}": v for k, v in WRONG.items()}).values()]
    )
    assert {name: s.value for name, s in zip(RIGHT, scores[: len(RIGHT)], strict=True) if s.value != 1} == {}
    assert {name: s.value for name, s in zip(WRONG, scores[len(RIGHT) :], strict=True) if s.value != 0} == {}
    assert not any(s.failed or s.timed_out for s in scores)
    assert scores[len(RIGHT) + 1].details == {"tests_passed": 1 / 3}


def test_a_share_is_given_where_it_is_asked_for(reward):
    reward._partial = True
    try:
        assert [s.value for s in reward.score([item("def add(a, b): return 3", tests=TESTS)])] == [pytest.approx(1 / 3)]
    finally:
        reward._partial = False


def test_nobody_passes_without_solving(reward):
    batch = [item(program, tests=TESTS) for program in FOOLING.values()]
    scores = reward.score([*batch, item("def add(a, b): return a + b", tests=TESTS)])
    assert {name: s.value for name, s in zip(FOOLING, scores, strict=False) if s.value} == {}
    assert scores[-1].value == 1  # and the worker goes on


def test_nobody_gets_out(reward, tmp_path):
    (tmp_path / "victim").write_text("untouched")
    names, batch = [], []
    for name, attempt in ESCAPES.items():
        # 1: it was refused; 2: it went through. A program that dies of it has not got out either.
        program = (
            "def f():\n try:\n  "
            + attempt.format(folder=tmp_path).replace("\n", "\n  ")
            + "\n except BaseException: return 1\n return 2"
        )
        names.append(name)
        batch.append(item(program, tests="assert f() == 2"))
    scores = reward.score([*batch, item("def f(): return 2", tests="assert f() == 2")])
    assert {name for name, s in zip(names, scores, strict=False) if s.value} == set()
    assert scores[-1].value == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["victim"]
    assert (tmp_path / "victim").read_text() == "untouched"
    assert not Path("escaped").exists()


@pytest.mark.slow
def test_nobody_holds_up_the_run(impatient):
    batch = [item(f"{program}\ndef add(a, b): return a + b" if "\n" not in program else program, tests=TESTS)
             for program in HOLDING_UP.values()]  # fmt: skip
    scripts = [item(program, cases=[{"input": "", "output": ""}]) for program in HOLDING_UP.values()]
    scores = impatient.score([*batch, *scripts])
    assert {n: s for n, s in zip([*HOLDING_UP, *HOLDING_UP], scores, strict=True) if s.value} == {}
    assert not any(s.failed for s in scores)
    assert max(s.seconds for s in scores) < PATIENCE  # what sleeps does so for 600 seconds
    assert impatient.score([item("def add(a, b): return a + b", tests=TESTS)])[0].value == 1


@pytest.mark.slow
def test_no_process_is_left(impatient):
    impatient.score([item("import time; time.sleep(600)", tests=TESTS)])
    impatient.close()

    def orphans():
        every = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
        return [
            line
            for line in every.splitlines()
            if line.split()[0] == "1" and "fork_server.py" in line and str(os.getpid()) in line
        ]

    wait_until(lambda: not orphans(), "its processes end")


def test_where_the_program_stands():
    assert program_in("```python\na\n```") == "a\n"
    assert program_in("```\na\n```\n```py\nb\n```\n```bash\nc\n```") == "b\n"
    assert program_in("```python\na") is None
    assert program_in("no code") is None
    assert program_in("```python\n\n```") is None
    assert program_in("```python\na = '```'\n```") == "a = '```'\n"
    # Linear in the length: work that grows with its square would not end on a million characters.
    program_in("```\n" * 250_000)
    program_in("`" * 1_000_000)


def test_no_program_and_no_tests(reward):
    (score,) = reward.score([item("def add(a, b): return a + b", fenced=False, tests=TESTS)])
    assert (score.value, score.no_answer) == (0.0, True)
    broken: list[dict[str, Any]] = [
        {},
        {"tests": []},
        {"tests": [" "]},
        {"cases": []},
        {"tests": TESTS, "cases": [{"input": "", "output": ""}]},
    ]
    for extra in broken:
        with pytest.raises(RewardError, match="ValueError: row 'p' has"):
            score_all([reward], [item("x = 1", **extra)])
    with pytest.raises(RewardError, match="is no Python"):
        score_all([reward], [item("x = 1", tests="assert (")])


def test_names_of_the_solution_are_told_by_the_test():
    assert unknown_names("import math\nx = f(math.pi)\ndef g(y): return y + h(x)\nassert len(g(1))") == {"f", "h"}
    assert unknown_names("assert (") == set()


def test_values_survive_the_way():
    values: list[Any] = [float("inf"), -0.0, 2**60, -(2**60), {"a": (1, {2: {3}})}, b"", [], ()]
    for value in values:
        assert repr(unpack(read(write(pack(value))), int)) == repr(value)


def test_without_a_sandbox_it_refuses_or_says_so(monkeypatch):
    monkeypatch.setattr(sandbox, "check", lambda: "Landlock: not there")
    with pytest.raises(UserError, match="cannot be confined on this machine: Landlock"):
        CodeReward()
    with pytest.warns(UserWarning, match="WITHOUT a whole sandbox: Landlock"):
        CodeReward(unprotected=True).close()
    with pytest.raises(UserError, match="limit is 0"):
        CodeReward(limit=0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_sandbox_needs_no_privileges(tmp_path):
    script = tmp_path / "sandbox.py"
    script.write_bytes(Path(sandbox.__file__).read_bytes())
    code = f"import os, sys; os.setgid(65534); os.setuid(65534); exec(open({str(script)!r}).read())"
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/"):
            folder.chmod(0o755)
    done = subprocess.run([python, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "confined", done.stderr
