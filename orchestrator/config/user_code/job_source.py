"""Look at a job's class without importing it: does it exist, is it a job, do its arguments fit?

The submitting side must neither import a framework nor run a user's code, so the source is read
with `ast`. What cannot be decided from the source (a class made by a function, say) is left to the
workers, which check again with the class in hand.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.config.user_code.class_source import (
    Lineage,
    SourceClass,
    absent,
    find_module,
    lineage_of,
    load_module,
    no_module,
    once,
)
from orchestrator.config.user_code.job_slips import refuse_slips
from orchestrator.config.user_code.returned import DEFINITIONS, figures_of, no_table
from orchestrator.errors import JobError, did_you_mean
from orchestrator.job import COUPLED_METHODS, REQUIRED_METHODS


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFacts:
    """What the source says of a job; None where it does not say. `figures`: that it evaluates.
    `talks_in_window`: that its loss calls collectives.
    """

    framework: str | None = None
    metric_count: int | None = None
    coupled: bool = False
    own_optimizer: bool | None = None
    own_rate: bool = False
    talks_in_window: bool = False
    figures: tuple[str, ...] | None = None
    source: Path | None = None


def _constant(members: Mapping[str, ast.stmt], name: str) -> Any:
    node = members.get(name)
    value = getattr(node, "value", None)
    return value.value if isinstance(value, ast.Constant) else None


def _framework(lineage: Lineage) -> str | None:
    """What the class says; torch, as `Job` has it, when all of its sources are known and none says
    anything; None when that cannot be told.
    """
    members = lineage.members()
    if "framework" in members:
        return _constant(members, "framework")
    by_instance = any(
        isinstance(node, ast.Attribute) and node.attr == "framework"
        for item in lineage.classes
        for node in ast.walk(item.node)
    )
    return "torch" if lineage.complete and not by_instance else None


def _own_optimizer(lineage: Lineage) -> bool | None:
    """Whether the class builds its optimizer itself; None when its source does not tell.

    A method that may give None leaves the choice to the configuration.
    """
    node = lineage.members().get("optimizer")
    if node is None:
        return False if lineage.complete else None
    if not isinstance(node, DEFINITIONS) or not isinstance(node.body[-1], ast.Return | ast.Raise):
        return None
    returned = [item.value for item in ast.walk(node) if isinstance(item, ast.Return)]
    undecided = any(
        value is None
        or any(isinstance(part, ast.Constant) and part.value is None for part in ast.walk(value))
        or "super" in ast.dump(value)
        for value in returned
    )
    return None if undecided else bool(returned)


def _figures(lineage: Lineage) -> tuple[str, ...] | None:
    method = lineage.members().get("evaluate")
    if method is None:
        return () if lineage.complete else None
    return figures_of(method) if isinstance(method, DEFINITIONS) else None


def builds_optimizer(dotted: str) -> bool | None:
    """Whether the job of this name builds its own optimizer; None when that cannot be told.

    Raises:
        JobError: its file is no Python.
    """
    lineage = lineage_of(dotted)
    return _own_optimizer(lineage) if lineage else None


def check_target(job: Mapping[str, Any]) -> TargetFacts:
    """Check `job._target_` and the keys beside it. Nothing is imported, nothing is run.

    Raises:
        JobError: the module or class does not exist, is not a job, or takes other arguments.
    """
    return once("job", lambda _: _check_target(job), repr(job))


def _check_target(job: Mapping[str, Any]) -> TargetFacts:
    dotted = str(job["_target_"])
    if find_module(dotted.split(".", maxsplit=1)[0]) is None and "." in dotted:
        raise JobError(no_module(f"job._target_={dotted}", dotted.rpartition(".")[0]))
    if sentence := absent(dotted, "job._target_"):
        raise JobError(sentence)
    module_name, _, name = dotted.rpartition(".")
    module = load_module(module_name)
    found = module.resolve(name) if module else None
    if module is None or not isinstance(found, SourceClass):
        if isinstance(found, DEFINITIONS):
            raise JobError(
                f"job._target_={dotted} is a function; it must be a class with "
                + ", ".join(REQUIRED_METHODS)
            )
        if module is None and dotted.split(".", maxsplit=1)[0] in sys.stdlib_module_names:
            raise JobError(f"job._target_={dotted} is a part of Python, not a job")
        return TargetFacts(source=module.source if module else None)
    return _check_class(dotted, found, job)


def _check_class(dotted: str, found: SourceClass, job: Mapping[str, Any]) -> TargetFacts:
    lineage = Lineage(found)
    members = lineage.members()
    missing = [method for method in REQUIRED_METHODS if method not in members]
    coupled = set(COUPLED_METHODS) <= set(members)
    if coupled:
        missing = [method for method in missing if method != "loss"]
    if missing and lineage.complete:
        raise JobError(
            f"job._target_={dotted} is not a job: it has no {' and no '.join(missing)} "
            f"(see docs/tutorial/your-own-job.md)"
        )
    parameters = lineage.parameters()
    # Of a class that shows no part of a job, the ranks say so, with the class in hand.
    if parameters is not None and (lineage.complete or len(missing) < len(REQUIRED_METHODS)):
        known, required = parameters
        given = [key for key in job if key != "_target_"]
        for key in given:
            if key not in known:
                raise JobError(
                    f"{dotted} takes no argument '{key}' (from job.{key}){did_you_mean(key, known)}"
                )
        for key in required:
            if key not in given:
                raise JobError(f"{dotted} needs the argument '{key}'; add job.{key}=…")
    refuse_slips(dotted, members, [item.node for item in lineage.classes])
    evaluate = members.get("evaluate")
    figures = no_table(evaluate) if isinstance(evaluate, DEFINITIONS) else None
    if figures is not None:
        raise JobError(
            f"{dotted}.evaluate() must return figures by name, as in "
            f"return {{'accuracy': 0.9}}, but returns {figures}"
        )
    names = getattr(members.get("metric_names"), "value", None)
    return TargetFacts(
        framework=_framework(lineage),
        metric_count=len(names.elts) if isinstance(names, ast.Tuple | ast.List) else None,
        coupled=coupled,
        own_optimizer=_own_optimizer(lineage),
        own_rate=isinstance(members.get("learning_rate"), DEFINITIONS),
        talks_in_window=bool(_constant(members, "talks_in_window")),
        figures=_figures(lineage),
        source=found.module.source,
    )
