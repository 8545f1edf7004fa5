"""The two confined processes of a code test.

The candidate holds the completion's program and nothing else, the test runner holds the tests. Standard library only.
The candidate never sees a test or an expected value: it gets the arguments of one call at a time and sends back plain
data. What it does to its own interpreter (patching ``unittest``, ``builtins`` or comparison methods, leaving with
``os._exit(0)``, printing what a passing test would print) stays there.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from lit_grpo.rewards.code.values import MAX_BYTES, Unplain, pack, read, unpack, write


def candidate(channel: Connection, script: bool) -> None:
    """Load the program that comes first on the channel, then answer calls. Never returns."""
    source = channel.recv_bytes().decode("utf-8", "surrogatepass")
    names: dict[str, Any] = {"__name__": "__main__" if script else "solution", "__builtins__": builtins}
    if script:
        try:
            exec(compile(source, "solution.py", "exec"), names)
        # A program may end itself with exit(), which is a success unless it gives a code.
        except SystemExit as error:
            _leave(0 if error.code in (None, 0) else 1)
        except BaseException:
            _leave(1)
        _leave(0)
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    try:
        exec(compile(source, "solution.py", "exec"), names)
        reply: dict[str, Any] = {"ready": True}
    except BaseException as error:
        reply = {"failed": type(error).__name__}
    channel.send_bytes(write(reply))
    while True:
        request = read(channel.recv_bytes())
        try:
            arguments = unpack(request["a"], objects.__getitem__)
            named = unpack(request["k"], objects.__getitem__)
            owner = names if request["o"] is None else objects[request["o"]]
            if request["o"] is None:
                function = names[request["n"]] if request["n"] in names else getattr(builtins, request["n"])
            else:
                function = getattr(owner, request["n"])
            value = function(*arguments, **named) if request["c"] else function
            changed = [pack(x, keep) if isinstance(x, (list, dict, set)) else None for x in arguments]
            message = write({"v": pack(value, keep), "m": changed})
        except BaseException as error:
            error_name = type(error).__name__ if type(error).__module__ == "builtins" else "Exception"
            message = write({"e": error_name})
        channel.send_bytes(message)


def _leave(code: int) -> None:
    # os._exit skips what the program has registered for its end, and with it the flush of what it has printed.
    try:
        sys.stdout.flush()
    finally:
        os._exit(code)


class Remote:
    """Stand-in for an object of the candidate that is no plain data, whose method calls are sent to the candidate."""

    # It has no __eq__ that asks the candidate, whose own may always be true: it equals nothing but itself.

    def __init__(self, ask: Callable[..., Any], handle: int) -> None:
        self.__ask, self.__handle = ask, handle

    def __getattr__(self, name: str) -> Any:
        # Special methods that this class does not define are absent: Python looks for them by itself, on every copy or
        # comparison, and the candidate must not be asked.
        if name.startswith("__"):
            raise AttributeError(name)
        ask, handle = self.__ask, self.__handle
        return _attribute(ask, handle, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__ask(self.__handle, "__call__", True, args, kwargs)

    def __iter__(self) -> Any:
        return iter(self.__ask(self.__handle, "__iter__", True, (), {}))

    def __len__(self) -> int:
        return int(self.__ask(self.__handle, "__len__", True, (), {}))

    def __getitem__(self, key: Any) -> Any:
        return self.__ask(self.__handle, "__getitem__", True, (key,), {})

    def __bool__(self) -> bool:
        return True


def _attribute(ask: Callable[..., Any], handle: int, name: str) -> Any:
    """Return a method of the candidate's object as a function, a plain attribute as its value."""
    value = ask(handle, name, False, (), {})
    if isinstance(value, Remote):
        return lambda *args, **kwargs: ask(handle, name, True, args, kwargs)
    return value


def test_runner(channel: Connection, results: Connection, source: str, tests: list[str], entry: str | None) -> None:
    """Run the tests against the candidate at the other end of the channel, and report each. Never returns.

    Args:
        channel: to the candidate.
        results: to the worker; one message for each test, or one that says why the program could not be loaded.
        source: the program, which the candidate gets from here.
        tests: Python source, each one test.
        entry: name of the function that ``check`` of the tests is called with.
    """
    channel.send_bytes(source.encode("utf-8", "surrogatepass"))
    ready = read(channel.recv_bytes(MAX_BYTES))
    if "ready" not in ready:
        _report(results, {"load": str(ready.get("failed"))[:80]})
        os._exit(0)

    def ask(owner: int | None, name: str, call: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packed = pack(list(args), _no_handles), pack(kwargs, _no_handles)
        request = {"o": owner, "n": name, "c": call, "a": packed[0], "k": packed[1]}
        channel.send_bytes(write(request))
        reply = read(channel.recv_bytes(MAX_BYTES))
        if "e" in reply:
            error_class = getattr(builtins, str(reply["e"]), None)
            # Only what a test may want to see raised; SystemExit or AssertionError of the candidate are failures.
            if (
                not (isinstance(error_class, type) and issubclass(error_class, Exception))
                or error_class is AssertionError
            ):
                raise RuntimeError("the solution failed")
            raise error_class("raised by the solution")
        for mine, theirs in zip(args, reply.get("m") or (), strict=False):
            if theirs is not None:
                _update(mine, unpack(theirs, lambda handle: Remote(ask, handle)))
        return unpack(reply["v"], lambda handle: Remote(ask, handle))

    for test in tests:
        _report(results, {"passed": _passes(test, entry, ask)})
    os._exit(0)


def _no_handles(value: Any) -> int:
    if isinstance(value, Remote):
        return int(object.__getattribute__(value, "_Remote__handle"))
    raise Unplain(f"a test passes {type(value).__name__}, which is not plain data")


def _update(mine: Any, theirs: Any) -> None:
    """Repeat what a call did to a list, dict or set that it was given."""
    # The candidate changed its copy of it, and a test may look at its own afterwards.
    if isinstance(mine, list) and isinstance(theirs, list) and mine != theirs:
        mine[:] = theirs
    elif isinstance(mine, (dict, set)) and isinstance(theirs, type(mine)) and mine != theirs:
        mine.clear()
        mine.update(theirs)


def _passes(test: str, entry: str | None, ask: Callable[..., Any]) -> bool:
    names: dict[str, Any] = {"__name__": "tests"}
    for name in unknown_names(test) | ({entry} if entry else set()):
        names[name] = _stub(name, ask)
    injected = set(names)
    try:
        exec(compile(test, "tests.py", "exec"), names)
        if entry and callable(names.get("check")):
            names["check"](names[entry])
        return _run_collected({key: value for key, value in names.items() if key not in injected})
    # Whatever it raises, SystemExit too: a test that does not run to its end has not passed.
    except BaseException:
        return False


def _stub(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        return ask(None, name, True, args, kwargs)

    stub.__name__ = name
    return stub


def unknown_names(test: str) -> set[str]:
    """Return the names that a test uses and neither defines nor imports: those that the solution must have."""
    # Read from the test alone: the candidate has no say in it.
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    used: set[str] = set()
    bound = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return used - bound


def _run_collected(names: dict[str, Any]) -> bool:
    """Run the functions ``test_*`` and unittest cases that a test defines."""
    import unittest

    suite = unittest.TestSuite()
    for name, value in names.items():
        if isinstance(value, type) and issubclass(value, unittest.TestCase):
            suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(value))
        elif name.startswith("test_") and callable(value):
            value()
    outcome = unittest.TestResult()
    suite.run(outcome)
    return outcome.wasSuccessful()


def _report(results: Connection, message: dict[str, Any]) -> None:
    results.send_bytes(json.dumps(message).encode())
