"""Look at a job's class without importing it: does it exist, is it a job, do its arguments fit?

The submitting side must neither import a framework nor run a user's code, so the source is read
with `ast`. What cannot be decided from the source (a class made by a function, say) is left to the
workers, which check again with the class in hand.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from orchestrator.config.job_slips import refuse_slips
from orchestrator.config.returned import DEFINITIONS, no_table
from orchestrator.errors import JobError, did_you_mean
from orchestrator.job import COUPLED_METHODS, REQUIRED_METHODS

BASE_JOB = ("orchestrator.job", "Job")


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFacts:
    """What the source says of a job; None where it does not say."""

    framework: str | None = None
    metric_count: int | None = None
    coupled: bool = False
    own_optimizer: bool | None = None
    own_rate: bool = False
    source: Path | None = None


def find_module(dotted: str) -> ModuleSpec | None:
    """The module's spec, without running any package's `__init__`."""
    path: Any = None
    spec: ModuleSpec | None = None
    parts = dotted.split(".")
    for index in range(len(parts)):
        name = ".".join(parts[: index + 1])
        spec = None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path) if find else None
            if spec is not None:
                break
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and index + 1 < len(parts):
            return None
    return spec


@dataclass(frozen=True, slots=True)
class _Class:
    node: ast.ClassDef
    module: _Module


class _Module:
    """The names at the top of one source file."""

    def __init__(self, name: str, source: Path) -> None:
        self.name, self.source = name, source
        self.names: dict[str, ast.AST] = {}
        self.imports: dict[str, tuple[str, str | None]] = {}
        self.stars: list[str] = []
        self.open_ended = False
        try:
            tree = ast.parse(source.read_text(encoding="utf-8"), filename=str(source))
        except (SyntaxError, UnicodeDecodeError) as error:
            raise JobError(f"{source} cannot be read as Python: {error}") from error
        self._collect(tree.body)

    def _collect(self, body: Iterable[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.names[node.name] = node
                self.open_ended |= node.name == "__getattr__"
            elif isinstance(node, ast.ImportFrom):
                self._collect_from(node)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.split(".")[0]
                    self.imports[bound] = (alias.name if alias.asname else bound, None)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self.names[target.id] = node
            elif isinstance(node, ast.If | ast.Try | ast.With):
                for part in ("body", "orelse", "finalbody"):
                    self._collect(getattr(node, part, []))
                for handler in getattr(node, "handlers", []):
                    self._collect(handler.body)

    def _collect_from(self, node: ast.ImportFrom) -> None:
        package = self.name if self.source.name == "__init__.py" else self.name.rpartition(".")[0]
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        origin = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name == "*":
                self.open_ended = True
                self.stars.append(origin)
            else:
                self.imports[alias.asname or alias.name] = (origin, alias.name)

    def resolve(self, name: str, seen: frozenset[str] = frozenset()) -> _Class | ast.AST | None:
        """The class or statement behind a name here; None when the source does not tell."""
        if name in self.names:
            node = self.names[name]
            return _Class(node, self) if isinstance(node, ast.ClassDef) else node
        if name in self.imports and f"{self.name}.{name}" not in seen:
            origin, original = self.imports[name]
            other = load_module(origin) if original else None
            if other is not None and original is not None:
                return other.resolve(original, seen | {f"{self.name}.{name}"})
        for origin in self.stars if f"{self.name}.*" not in seen else ():
            other = load_module(origin)
            found = other.resolve(name, seen | {f"{self.name}.*"}) if other else None
            if found is not None:
                return found
        return None

    def resolve_dotted(self, parts: Sequence[str]) -> _Class | ast.AST | None:
        """The class behind `a.b.C` here, where `a` is an imported module."""
        if len(parts) == 1:
            return self.resolve(parts[0])
        origin, original = self.imports.get(parts[0], (None, None))
        if origin is None:
            return None
        base = origin if original is None else f"{origin}.{original}"
        module = load_module(".".join([base, *parts[1:-1]]))
        return module.resolve(parts[-1]) if module else None


def load_module(dotted: str) -> _Module | None:
    """Read a module's source; None when it has none (an extension, a namespace)."""
    spec = find_module(dotted)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return _Module(dotted, Path(spec.origin))


def _dotted(node: ast.AST) -> list[str]:
    """["a", "b", "C"] for the expression `a.b.C`; empty for any other."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (head := _dotted(node.value)):
        return [*head, node.attr]
    return []


class _Lineage:
    """A class and its bases, as far as the sources tell."""

    def __init__(self, leaf: _Class) -> None:
        self.complete = True
        self.classes: list[_Class] = []
        self._add(leaf)

    def _add(self, found: _Class) -> None:
        if (found.module.name, found.node.name) == BASE_JOB or any(
            c == found for c in self.classes
        ):
            return
        self.classes.append(found)
        self.complete &= all(
            k.arg == "metaclass" and _dotted(k.value)[-1:] == ["ABCMeta"]
            for k in found.node.keywords
        )
        for base in found.node.bases:
            parts = _dotted(base.value if isinstance(base, ast.Subscript) else base)
            resolved = found.module.resolve_dotted(parts) if parts else None
            if isinstance(resolved, _Class):
                self._add(resolved)
            elif parts[-1:] not in (["Protocol"], ["Generic"], ["ABC"]) and not (
                len(parts) == 1 and hasattr(builtins, parts[0]) and resolved is None
            ):
                self.complete = False

    def members(self) -> dict[str, ast.stmt]:
        found: dict[str, ast.stmt] = {}
        for item in self.classes:
            for node in item.node.body:
                if isinstance(node, DEFINITIONS):
                    found.setdefault(node.name, node)
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        if isinstance(target, ast.Name):
                            found.setdefault(target.id, node)
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.setdefault(node.target.id, node)
        return found

    def parameters(self) -> tuple[list[str], list[str]] | None:
        """(all, required) parameters of the constructor; None when the source does not tell."""
        init = self.members().get("__init__")
        if isinstance(init, DEFINITIONS):
            given = init.args
            if given.kwarg is not None:
                return None
            plain = [a.arg for a in (*given.posonlyargs, *given.args)][1:]
            required = plain[: len(plain) - len(given.defaults)] if given.defaults else list(plain)
            only = [a.arg for a in given.kwonlyargs]
            required += [a for a, d in zip(only, given.kw_defaults, strict=True) if d is None]
            return plain + only, required
        if not self.complete:
            return None
        decorated = [
            c
            for c in self.classes
            if any("dataclass" in ast.dump(d) for d in c.node.decorator_list)
        ]
        if not decorated:
            return [], []
        names: dict[str, bool] = {}
        for item in reversed(decorated):
            for node in item.node.body:
                if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                    continue
                if "ClassVar" not in ast.dump(node.annotation):
                    names[node.target.id] = node.value is None
        return list(names), [name for name, needed in names.items() if needed]


def _constant(members: Mapping[str, ast.stmt], name: str) -> Any:
    node = members.get(name)
    value = getattr(node, "value", None)
    return value.value if isinstance(value, ast.Constant) else None


def _framework(lineage: _Lineage) -> str | None:
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


def _own_optimizer(lineage: _Lineage) -> bool | None:
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


def _lineage_of(dotted: str) -> _Lineage | None:
    """A class and its bases by its dotted name; None where there is none, or no source."""
    module_name, _, name = dotted.rpartition(".")
    module = load_module(module_name) if module_name else None
    found = module.resolve(name) if module else None
    return _Lineage(found) if isinstance(found, _Class) else None


def builds_optimizer(dotted: str) -> bool | None:
    """Whether the job of this name builds its own optimizer; None when that cannot be told.

    Raises:
        JobError: its file is no Python.
    """
    lineage = _lineage_of(dotted)
    return _own_optimizer(lineage) if lineage else None


def arguments_of(dotted: str) -> list[str] | None:
    """What a class's constructor takes, by its source; None when that cannot be told."""
    lineage = _lineage_of(dotted)
    parameters = lineage.parameters() if lineage else None
    return parameters[0] if parameters else None


def check_target(job: Mapping[str, Any]) -> TargetFacts:
    """Check `job._target_` and the keys beside it. Nothing is imported, nothing is run.

    Raises:
        JobError: the module or class does not exist, is not a job, or takes other arguments.
    """
    dotted = str(job["_target_"])
    if find_module(dotted.split(".", maxsplit=1)[0]) is None and "." in dotted:
        raise JobError(_no_module(f"job._target_={dotted}", dotted.rpartition(".")[0]))
    if sentence := absent(dotted, "job._target_"):
        raise JobError(sentence)
    module_name, _, name = dotted.rpartition(".")
    module = load_module(module_name)
    found = module.resolve(name) if module else None
    if module is None or not isinstance(found, _Class):
        if isinstance(found, DEFINITIONS):
            raise JobError(
                f"job._target_={dotted} is a function; it must be a class with "
                + ", ".join(REQUIRED_METHODS)
            )
        if module is None and dotted.split(".", maxsplit=1)[0] in sys.stdlib_module_names:
            raise JobError(f"job._target_={dotted} is a part of Python, not a job")
        return TargetFacts(source=module.source if module else None)
    return _check_class(dotted, found, job)


def _no_module(spelled: str, module: str) -> str:
    return (
        f"{spelled}: there is no module '{module}' on Python's path; run from the folder that "
        f"holds it, or install it"
    )


def absent(dotted: str, key: str) -> str | None:
    """What is wrong with a class's dotted name; None if it is there, or if that cannot be told.

    A package that is not installed may be there on the nodes, so it is not judged.
    """
    module_name, _, name = dotted.rpartition(".")
    if not module_name:
        return f"{key} must be module.Class, but is '{dotted}'"
    if find_module(module_name.split(".", maxsplit=1)[0]) is None:
        return None
    if find_module(module_name) is None:
        return _no_module(f"{key}={dotted}", module_name)
    module = load_module(module_name)
    if module is None or module.resolve(name) is not None:
        return None
    if module.open_ended or name in module.imports:
        return None
    classes = [n for n, node in module.names.items() if isinstance(node, ast.ClassDef)]
    imported = [n for n in module.imports if n[:1].isupper()]
    return (
        f"{key}={dotted}: {module.source} has no class '{name}'"
        f"{did_you_mean(name, [*classes, *imported])}"
    )


def _check_class(dotted: str, found: _Class, job: Mapping[str, Any]) -> TargetFacts:
    lineage = _Lineage(found)
    members = lineage.members()
    missing = [method for method in REQUIRED_METHODS if method not in members]
    coupled = set(COUPLED_METHODS) <= set(members)
    if coupled:
        missing = [method for method in missing if method != "loss"]
    if missing and lineage.complete:
        raise JobError(
            f"job._target_={dotted} is not a job: it has no {' and no '.join(missing)} "
            f"(see docs/your-own-job.md)"
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
        source=found.module.source,
    )
