"""Text that is evaluated: arithmetic has its value, and nothing else is run."""

import pytest

from lit_grpo.rewards.isolation.expressions import evaluate

GOOD = {
    "[1, 2, [3, -4]]": [1, 2, [3, -4]],
    "['a', 'b']": ["a", "b"],
    "(0x3f + 0xa) << 2": (0x3F + 0xA) << 2,
    " 7 // 2 ** 2 ": 1,
    "{1: 'x', 2: None}": {1: "x", 2: None},
}
BAD = (
    "__import__('os').system('true')",
    "().__class__.__base__.__subclasses__()",
    "(lambda: 1)()",
    "[x for x in (1, 2)]",
    "(x := 3)",
    "'{0.__class__}'.format(1)",
    "f'{open}'",
    "open('/etc/passwd')",
    "[1, 2][0]",
    "print",  # a name without a value
    "__builtins__",
    "eval('1')",
    "sqrt('__import__(\"os\").getpid()')",
    "Symbol('x').func",
    "Lambda(1, 2)",
    "Function('f').mro()",
    "Function('f')('__import__')",
    "Symbol(name='x')",
    "1 if 2 else 3",
    "await x",
    "x = 1",
    "import os",
    "1; 2",
)


@pytest.mark.parametrize("text", GOOD)
def test_literals_and_arithmetic_have_their_value(text):
    assert evaluate(text) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_nothing_else_is_run(text):
    with pytest.raises((ValueError, SyntaxError, NameError, TypeError)):
        evaluate(text)


def test_names_come_from_the_namespaces_that_are_given_and_no_built_in_does():
    assert evaluate("sqrt(x) + y", {"sqrt": lambda v: v**0.5, "x": 9, "__builtins__": __builtins__}, {"y": 1}) == 4
    with pytest.raises(NameError):
        evaluate("abs(-1)", {"__builtins__": __builtins__})


@pytest.mark.parametrize("source", [b"1 + 1", compile("1 + 1", "x", "eval"), None, 5])
def test_only_text_is_evaluated(source):
    with pytest.raises(ValueError, match="only text"):
        evaluate(source)
