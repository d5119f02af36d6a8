"""Checks of a user's job class or program by its source, without importing it."""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
import re
import shutil
import stat
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.config.program import Program
from orchestrator.errors import JobError, did_you_mean, nearest
from orchestrator.job import COUPLED_METHODS, REQUIRED_METHODS

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


Answer = TypeVar("Answer")
Asked = TypeVar("Asked")
BASE_JOB = ("orchestrator.job", "Job")


_known: dict[tuple[str, Any], Any] | None = None  # what was asked and answered, while it is kept


@contextlib.contextmanager
def read_once() -> Generator[None]:
    """Each source is read once for all that is asked inside, so that what is asked of many jobs is
    answered quickly, and of one state of them.
    """
    global _known  # noqa: PLW0603  # what is asked inside asks through many functions
    before, _known = _known, {} if _known is None else _known
    try:
        yield
    finally:
        _known = before


def once(name: str, find: Callable[[Asked], Answer], asked: Asked) -> Answer:
    """What `find` says of `asked`; where sources are read once, what it said the first time."""
    if _known is None:
        return find(asked)
    if (name, asked) not in _known:
        _known[name, asked] = find(asked)
    return _known[name, asked]


def find_module(dotted: str) -> ModuleSpec | None:
    """The module's spec, without running any package's `__init__`."""
    return once("spec", _find_module, dotted)


def _find_module(dotted: str) -> ModuleSpec | None:
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
class SourceClass:
    """A class statement, and the file that it stands in."""

    node: ast.ClassDef
    module: SourceModule


class SourceModule:
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

    def resolve(
        self, name: str, seen: frozenset[str] = frozenset()
    ) -> SourceClass | ast.AST | None:
        """The class or statement behind a name here; None when the source does not tell."""
        if name in self.names:
            node = self.names[name]
            return SourceClass(node, self) if isinstance(node, ast.ClassDef) else node
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

    def resolve_dotted(self, parts: Sequence[str]) -> SourceClass | ast.AST | None:
        """The class behind `a.b.C` here, where `a` is an imported module."""
        if len(parts) == 1:
            return self.resolve(parts[0])
        origin, original = self.imports.get(parts[0], (None, None))
        if origin is None:
            return None
        base = origin if original is None else f"{origin}.{original}"
        module = load_module(".".join([base, *parts[1:-1]]))
        return module.resolve(parts[-1]) if module else None


def load_module(dotted: str) -> SourceModule | None:
    """Read a module's source; None when it has none (an extension, a namespace)."""
    return once("source", _load_module, dotted)


def _load_module(dotted: str) -> SourceModule | None:
    spec = find_module(dotted)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return SourceModule(dotted, Path(spec.origin))


def _dotted(node: ast.AST) -> list[str]:
    """["a", "b", "C"] for the expression `a.b.C`; empty for any other."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (head := _dotted(node.value)):
        return [*head, node.attr]
    return []


class Lineage:
    """A class and its bases, as far as the sources tell."""

    def __init__(self, leaf: SourceClass) -> None:
        self.complete = True
        self.classes: list[SourceClass] = []
        self._add(leaf)

    def _add(self, found: SourceClass) -> None:
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
            if isinstance(resolved, SourceClass):
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


def lineage_of(dotted: str) -> Lineage | None:
    """A class and its bases by its dotted name; None where there is none, or no source."""
    module_name, _, name = dotted.rpartition(".")
    module = load_module(module_name) if module_name else None
    found = module.resolve(name) if module else None
    return Lineage(found) if isinstance(found, SourceClass) else None


def arguments_of(dotted: str) -> list[str] | None:
    """What a class's constructor takes, by its source; None when that cannot be told."""
    lineage = lineage_of(dotted)
    parameters = lineage.parameters() if lineage else None
    return parameters[0] if parameters else None


def no_module(spelled: str, module: str) -> str:
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
        return no_module(f"{key}={dotted}", module_name)
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


ELF = b"\x7fELF"
PYTHONS = ("python", "python3")
MOST_NAMED = 200


def check_program(program: Program) -> None:
    """Refuse what cannot be started. Raises `JobError`."""
    if program.is_module:
        _check_module(program.target)
        return
    path = Path(program.target).expanduser()
    if os.sep not in program.target and not path.exists():
        if shutil.which(program.target) is None:
            raise JobError(_not_there(program.target, path))
        return
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise JobError(_not_there(program.target, path)) from None
    except OSError as error:
        raise JobError(f"{program.target} cannot be looked at: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        raise JobError(
            f"{program.target} is a folder; to run a package of Python: -m "
            f"{path.name.replace('-', '_')}"
        )
    if not stat.S_ISREG(mode):
        raise JobError(f"{program.target} is no file that could be run")
    if not os.access(path, os.R_OK):
        raise JobError(f"{program.target} may not be read by you")
    if path.suffix == ".py":
        _check_python(program.target, path)
    else:
        _check_executable(program.target, path)


def copied_script(program: Program) -> Path | None:
    """The script that a copy of the code has to hold; None for modules, binaries and what belongs
    to the machine.
    """
    script = script_of(program)
    if script is None or str(script.parent) in os.get_exec_path():
        return None
    with script.open("rb") as file:
        return None if file.read(len(ELF)) == ELF else script


def runs_here(program: Program) -> bool:
    """Whether what is run is a file or module of the user's, and not one that PATH finds."""
    return program.is_module or os.sep in program.target or Path(program.target).exists()


def script_of(program: Program) -> Path | None:
    """The file that is run, where it is one of the user's; None for modules and what PATH finds."""
    if program.is_module or not runs_here(program):
        return None
    return Path(os.path.abspath(Path(program.target).expanduser()))  # noqa: PTH100  # keeps links


def is_this_python(word: str) -> bool:
    """Whether a program's name means the Python that runs this.

    >>> is_this_python(sys.executable), is_this_python("train.py")
    (True, False)
    """
    found = shutil.which(word) if Path(word).name.startswith(PYTHONS) else None
    return found is not None and Path(found).resolve() == Path(sys.executable).resolve()


def _check_module(name: str) -> None:
    spelled = f"-m {name}"
    if find_module(name.split(".", maxsplit=1)[0]) is None or find_module(name) is None:
        raise JobError(
            f"{spelled}: there is no module '{name}' on Python's path; run from the folder that "
            f"holds it, or install it"
        )
    spec = find_module(name)
    if spec is not None and spec.submodule_search_locations is not None:
        if find_module(f"{name}.__main__") is None:
            raise JobError(f"{spelled}: the package has no __main__, so it cannot be run")
    else:
        load_module(name)  # whether it is Python at all


def _check_python(spelled: str, path: Path) -> None:
    """Whether it is Python at all, as every rank would find out."""
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # what it is warned of, it hears when it runs
            ast.parse(path.read_bytes(), spelled)
    except (SyntaxError, ValueError) as error:
        at = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise JobError(f"{spelled} is no Python: {at}{said}") from error


def _check_executable(spelled: str, path: Path) -> None:
    """A script in another language, or a binary: the kernel decides, so its rules are checked."""
    with path.open("rb") as file:
        first = file.readline(256)
    if not first.startswith((b"#!", ELF)):
        raise JobError(
            f"{spelled} does not say what runs it: its first line must be as in #!/bin/bash, or "
            f"name the interpreter: -- bash {spelled}"
        )
    if not os.access(path, os.X_OK):
        raise JobError(f"{spelled} may not be executed; chmod +x {spelled}")
    if first.startswith(b"#!"):
        _check_interpreter(spelled, os.fsdecode(first[2:]).removesuffix("\n"))


def _check_interpreter(spelled: str, line: str) -> None:
    """Args: line: what follows #!, as the kernel reads it."""
    wanted, _, rest = line.strip(" \t").partition(" ")
    if wanted.endswith("\r") or rest.endswith("\r"):
        raise JobError(
            f"{spelled} has lines that end as on Windows, which the kernel takes for a part of "
            f"{wanted.strip()}; mend them: sed -i 's/\\r$//' {spelled}"
        )
    if wanted and not Path(wanted).exists():
        raise JobError(f"{spelled} wants {wanted}, which is not on this machine")
    named = rest.split()[:1]
    through_env = Path(wanted).name == "env" and named and not re.search("^-|=", named[0])
    if through_env and shutil.which(named[0]) is None:
        raise JobError(f"{spelled} wants {named[0]}, which is not on PATH")


def _not_there(spelled: str, path: Path) -> str:
    told = f"there is no program {spelled}"
    if os.sep not in spelled and path.suffix == "":
        told += " here or on PATH"
    try:
        names = [entry.name for entry in os.scandir(path.parent)][:MOST_NAMED]
    except OSError:  # the folder is not there either
        return f"{told}: there is no folder {path.parent}"
    found = nearest(path.name, names)
    return told + (f"; did you mean {path.with_name(found)}?" if found else "")
