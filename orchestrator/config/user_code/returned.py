"""What a method surely returns, read from its source: to refuse a wrong one before anything starts.

Only what is certain counts: a call of something unknown, or one return among several that may be
right, is left to the run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOTHING = "nothing"
_DISPLAYS: dict[type[ast.expr], str] = {
    ast.List: "a list", ast.ListComp: "a list", ast.Tuple: "a tuple", ast.Set: "a set",
    ast.SetComp: "a set", ast.GeneratorExp: "a generator", ast.JoinedStr: "a str",
    ast.Compare: "the outcome of a comparison", ast.UnaryOp: "a number",
}  # fmt: skip
_CALLS = {
    "float": "a number", "int": "a number", "len": "a number", "round": "a number",
    "abs": "a number", "list": "a list", "tuple": "a tuple", "str": "a str", "bool": "a bool",
    "sorted": "a list",
}  # fmt: skip


def no_table(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """What a method returns that is no dictionary, whatever happens in it; None when it may be one.

    >>> def told(source: str) -> str | None:
    ...     return no_table(ast.parse(source).body[0])
    >>> told("def f(x): x.go()"), told("def f(x): return x.n / 10"), told("def f(x): return g(x)")
    ('nothing', 'a number', None)
    """
    if method.decorator_list:
        return None
    if isinstance(method, ast.AsyncFunctionDef):
        return "a coroutine"
    parts = list(_own(method))
    if any(isinstance(part, ast.Yield | ast.YieldFrom) for part in parts):
        return "a generator"
    kinds = [_kind(part.value) for part in parts if isinstance(part, ast.Return)]
    if not kinds:
        return None if any(isinstance(part, ast.Raise) for part in parts) else NOTHING
    return None if None in kinds else kinds[0]


def figures_of(method: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...] | None:
    """The names in the dictionaries that a method returns; None where its source does not tell.

    >>> def told(source: str) -> tuple[str, ...] | None:
    ...     return figures_of(ast.parse(source).body[0])
    >>> told("def f(x): return {'accuracy': x}"), told("def f(x): return {**x}")
    (('accuracy',), None)
    """
    returns = [part.value for part in _own(method) if isinstance(part, ast.Return)]
    found: dict[str, None] = {}
    for value in returns:
        if not isinstance(value, ast.Dict):
            return None
        for key in value.keys:
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                return None
            found[key.value] = None
    return None if method.decorator_list or not returns else tuple(found)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """All parts of a function but those of functions and classes in it."""
    for part in ast.iter_child_nodes(node):
        yield part
        if not isinstance(part, (*DEFINITIONS, ast.Lambda, ast.ClassDef)):
            yield from _own(part)


def _kind(value: ast.expr | None) -> str | None:
    """What an expression surely is, other than a dictionary; None when that is not certain."""
    if value is None:
        return NOTHING
    if isinstance(value, ast.Constant):
        return NOTHING if value.value is None else f"a {type(value.value).__name__}"
    if isinstance(value, ast.BinOp):  # dictionaries know | alone
        return None if isinstance(value.op, ast.BitOr) else "a number"
    if isinstance(value, ast.Call):
        called = value.func
        if isinstance(called, ast.Attribute):
            return "a number" if called.attr == "item" and not value.args else None
        return _CALLS.get(called.id) if isinstance(called, ast.Name) else None
    return _DISPLAYS.get(type(value))
