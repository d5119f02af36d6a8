"""Slips in a job's class that Python takes without a word, read from its source.

A `return` that was forgotten, a method that is spelled in another way than the one it is meant to
be, a comma that makes a tuple: each would train, with something else than what stands there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from orchestrator.config.user_code.returned import DEFINITIONS, NOTHING, no_table
from orchestrator.errors import JobError
from orchestrator.job import COUPLED_METHODS, REQUIRED_METHODS

GIVING = (*REQUIRED_METHODS, *COUPLED_METHODS, "optimizer", "collate", "learning_rate")
"""Methods whose whole purpose is what they return."""

KNOWN = (
    *GIVING, "evaluate", "after_update", "framework", "metric_names", "augments",
    "talks_in_window",
)  # fmt: skip
_CLOSE = 0.82  # collate_fn is collate, losses are no loss


def refuse_slips(
    dotted: str, members: Mapping[str, ast.stmt], bodies: Sequence[ast.ClassDef]
) -> None:
    """Raise `JobError` for what cannot be meant.

    Args:
        dotted: the class's name, for messages.
        members: its methods and attributes, and its bases', as far as sources are known.
        bodies: the sources of these classes, its own first, in which a method may be used.
    """
    for name in GIVING:
        method = members.get(name)
        if isinstance(method, DEFINITIONS) and _forgets_to_return(method):
            raise JobError(f"{dotted}.{name}() returns nothing; is a `return` missing in it?")
    names = members.get("metric_names")
    value = getattr(names, "value", None)
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        raise JobError(
            f"{dotted}.metric_names must be a tuple of names, as in ({value.value!r},), but is the "
            f"text {value.value!r}"
        )
    strange = [n for n in members if n not in KNOWN and not n.startswith("_")]
    close = {name: get_close_matches(name, KNOWN, n=1, cutoff=_CLOSE) for name in strange}
    if any(close.values()):
        own = {node.name for node in bodies[0].body if isinstance(node, DEFINITIONS)}
        used = _used(bodies)
        for name, meant in close.items():
            if meant and meant[0] not in own and name not in used:
                raise JobError(
                    f"{dotted} has '{name}', which nobody uses; did you mean '{meant[0]}'? "
                    f"Otherwise call it '_{name}'"
                )


def _forgets_to_return(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether something is made in it and nothing returned; `pass` and `return None` are meant."""
    makes = any(isinstance(part, ast.Call) for part in ast.walk(method))
    returns = any(isinstance(part, ast.Return) for part in ast.walk(method))
    return makes and not returns and no_table(method) == NOTHING


def _used(bodies: Iterable[ast.AST]) -> set[str]:
    """Names that are looked up on something, or as they are."""
    found: set[str] = set()
    for body in bodies:
        for part in ast.walk(body):
            if isinstance(part, ast.Attribute):
                found.add(part.attr)
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                found.add(part.id)
    return found
