"""Evaluation of an expression that nobody has read: numbers, text, lists and the functions of a calculator.

Some libraries hand text to Python's ``eval``, which runs whatever stands in it. :func:`evaluate` takes its place there:
it looks at the whole syntax tree first and refuses what is neither a literal nor arithmetic. Attributes, subscripts,
comprehensions, lambdas, names with an underscore in front and calls of any other function are all refused, so nothing
can be reached from the values that an expression is made of. Standard library only.
"""

from __future__ import annotations

import ast
from typing import Any

_LITERALS = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load)
_ARITHMETIC = (ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator)
_OF_TEXT = frozenset({"Symbol", "Integer", "Float", "Rational", "Function"})
"""Functions that SymPy's parser itself writes around the text of a name or a number."""
_FUNCTIONS = _OF_TEXT | {
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc", "atan2"),
    *("sinh", "cosh", "tanh", "coth", "sech", "csch", "asinh", "acosh", "atanh", "acoth", "asech", "acsch"),
    *("exp", "log", "ln", "sqrt", "cbrt", "root", "Abs", "abs", "sign", "floor", "ceiling", "factorial", "binomial"),
    *("Add", "Mul", "Pow", "Mod", "Max", "Min", "erf", "erfi", "gamma", "Ei", "li", "Si", "Ci", "int", "float"),
}  # fmt: skip
"""Functions that an expression may call. None of them runs text that it is given, or reaches outside."""


def evaluate(source: object, names: dict[str, Any] | None = None, local: Any = None) -> Any:
    """Evaluate an expression of literals and arithmetic; it takes the arguments of ``eval``.

    Args:
        source: the text of the expression.
        names: values of the names in it, as the first namespace of ``eval``.
        local: values that come before those.

    Raises:
        ValueError: the expression holds anything else.
        SyntaxError: the text is no expression.
    """
    if not isinstance(source, str):
        raise ValueError(f"only text is evaluated, not a {type(source).__name__}")
    tree = ast.parse(source.strip(), mode="eval")
    for node in ast.walk(tree):
        _check(node)
    # Compiled from the tree that was looked at, and without any built-in that was not named.
    namespace = {"__builtins__": {}, **(names or {})}
    namespace["__builtins__"] = {}
    return eval(compile(tree, "<expression>", "eval"), namespace, local)


def _check(node: ast.AST) -> None:
    if isinstance(node, ast.Call):
        name = _called(node)
        if name is None or node.keywords:
            raise ValueError("it calls what is no function of a calculator")
        # Many functions of SymPy parse and evaluate a text that they are given.
        texts = [a for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str | bytes)]
        if texts and name not in _OF_TEXT:
            raise ValueError(f"it hands a text to {name}")
    elif isinstance(node, ast.Name):
        if node.id.startswith("_") or not isinstance(node.ctx, ast.Load):
            raise ValueError("it uses a name with an underscore in front")
    elif not isinstance(node, _LITERALS + _ARITHMETIC):
        raise ValueError(f"it holds {type(node).__name__}, which is no arithmetic")


def _called(call: ast.Call) -> str | None:
    function = call.func
    # SymPy writes a function that it does not know as Function('f')(x).
    if isinstance(function, ast.Call):
        return "f" if _called(function) == "Function" else None
    return function.id if isinstance(function, ast.Name) and function.id in _FUNCTIONS else None
