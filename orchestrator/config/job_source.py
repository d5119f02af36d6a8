"""Checks of a user's job class or program by its source, without importing it.

The submitting side imports no framework and runs no user code, so it checks only that a job's
module and class exist, and reads the class attributes that a plan needs. The workers, which build
the job, check everything else.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from orchestrator.config.program import ProgramConfig
from orchestrator.errors import JobError, did_you_mean, expand_user, nearest
from orchestrator.job import COUPLED_METHODS

Value = TypeVar("Value")
Given = ParamSpec("Given")
Definition = ast.FunctionDef | ast.AsyncFunctionDef
OWN_BASES = ("orchestrator.Job", "orchestrator.job.Job")
BASES_WITHOUT_MEMBERS = ("object", "Protocol", "Generic", "ABC")

_cache: dict[Any, Any] | None = None


@contextlib.contextmanager
def read_once() -> Generator[None]:
    """Read each source file at most once inside this block, for speed and consistency."""
    global _cache  # noqa: PLW0603  # the cached lookups are called through many functions
    before, _cache = _cache, {} if _cache is None else _cache
    try:
        yield
    finally:
        _cache = before


def cached(function: Callable[Given, Value]) -> Callable[Given, Value]:
    """Cache the results of a function, by its arguments, inside `read_once`."""

    @functools.wraps(function)
    def look_up(*args: Given.args, **kwargs: Given.kwargs) -> Value:
        if _cache is None:
            return function(*args, **kwargs)
        key = (function, args)
        if key not in _cache:
            _cache[key] = function(*args, **kwargs)
        return _cache[key]

    return look_up


@cached
def find_module(dotted: str) -> ModuleSpec | None:
    """Find a module's spec without running the `__init__` of its packages."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = dotted.split(".")
    for index, part in enumerate(parts):
        name = ".".join(parts[: index + 1])
        for finder in sys.meta_path:
            # By its whole name, it would look for the parent of a package without `__init__.py`
            # among the imported modules.
            known_as = part if finder is PathFinder else name
            spec = finder.find_spec(known_as, path) if hasattr(finder, "find_spec") else None
            if spec is not None:
                break
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            return spec if index + 1 == len(parts) else None
        # A namespace's own list follows changes of `sys.path`.
        path = spec.submodule_search_locations = list(spec.submodule_search_locations)
    return spec


@dataclass(frozen=True, slots=True)
class SourceModule:
    """The names that a source file defines or imports at its top level.

    Attributes:
        open_ended: other names may exist, from a star import or a module `__getattr__`.
    """

    path: Path
    names: Mapping[str, ast.stmt]
    imports: Mapping[str, str]
    open_ended: bool


@cached
def load_module(dotted: str) -> SourceModule | None:
    """Read a module's source. Return None if it has none (an extension or a namespace)."""
    spec = find_module(dotted)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise JobError(f"{path} cannot be read as Python: {error}") from error
    package = dotted if path.name == "__init__.py" else dotted.rpartition(".")[0]
    names: dict[str, ast.stmt] = {}
    imports: dict[str, str] = {}
    open_ended = False
    for node in _statements(tree.body):
        if isinstance(node, ast.ClassDef | Definition):
            names[node.name] = node
            open_ended |= node.name == "__getattr__"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names |= dict.fromkeys(_assigned(node), node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                imports[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            origin = origin_of(node, package)
            open_ended |= node.names[0].name == "*"
            imports |= {a.asname or a.name: f"{origin}.{a.name}" for a in node.names}
    return SourceModule(path, names, imports, open_ended)


def origin_of(node: ast.ImportFrom, package: str) -> str:
    """Return the dotted name of the module that a `from … import` of this package names."""
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    return ".".join([*above, *filter(None, [node.module])])


def _statements(body: Iterable[ast.stmt]) -> Generator[ast.stmt]:
    """Yield statements, also those inside `if`, `try` and `with`."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@dataclass(frozen=True, slots=True)
class ClassSource:
    """The members of a class and of its bases.

    Attributes:
        complete: the source of every base was found.
        decorated: a decorator or a metaclass may change the class or one of its bases.
    """

    members: Mapping[str, ast.stmt]
    complete: bool
    decorated: bool = False

    def constant(self, name: str) -> Any:
        """Return the value of a class attribute, or None if it is no constant."""
        value = getattr(self.members.get(name), "value", None)
        return value.value if isinstance(value, ast.Constant) else None


@cached
def _find(dotted: str, depth: int = 8) -> ast.stmt | ClassSource | None:
    """Find the statement or class that a dotted name means; None if the source does not tell."""
    module_name, _, name = dotted.rpartition(".")
    module = load_module(module_name) if module_name and depth else None
    if module is None:
        return None
    if name in module.imports:
        return _find(module.imports[name], depth - 1)
    node = module.names.get(name)
    if not isinstance(node, ast.ClassDef):
        return node
    members: dict[str, ast.stmt] = {}
    for item in node.body:
        if isinstance(item, Definition):
            members[item.name] = item
        elif isinstance(item, ast.Assign | ast.AnnAssign):
            members |= dict.fromkeys(_assigned(item), item)
    complete, decorated = True, bool(node.decorator_list or node.keywords)
    for spelled, dotted_base in _bases(node, module, module_name):
        if dotted_base in OWN_BASES:  # its members are defaults, which a plan knows
            continue
        base = _find(dotted_base, depth - 1)
        if isinstance(base, ClassSource):
            members = {**base.members, **members}
            complete &= base.complete
            decorated |= base.decorated
        else:
            complete &= spelled.rpartition(".")[2] in BASES_WITHOUT_MEMBERS
    return ClassSource(members, complete, decorated)


def _bases(
    node: ast.ClassDef, module: SourceModule, module_name: str
) -> Generator[tuple[str, str]]:
    """Yield each base as it is spelled, and its dotted name."""
    for base in node.bases:
        spelled = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        first, _, rest = spelled.partition(".")
        origin = module.imports.get(first, f"{module_name}.{first}")
        yield spelled, f"{origin}.{rest}" if rest else origin


def find_class(dotted: str) -> ClassSource | None:
    """Find a class by its dotted name; None if there is none, or its source does not tell."""
    source = _find(dotted)
    return source if isinstance(source, ClassSource) else None


def missing_class(dotted: str, key: str) -> str | None:
    """Return why a class cannot exist; None if it exists, or if that is not known.

    A package that is not installed here may be installed on the nodes.
    """
    module_name, _, name = dotted.rpartition(".")
    if not module_name:
        return _names_module(dotted, key) or f"{key} must be module.Class, but is '{dotted}'"
    if find_module(module_name.split(".", maxsplit=1)[0]) is None:
        return None
    if find_module(module_name) is None:
        return _missing_module(f"{key}={dotted}", module_name)
    module = load_module(module_name)
    if module and (module.open_ended or name in module.names or name in module.imports):
        return None
    if (sentence := _names_module(dotted, key)) or module is None:
        return sentence
    classes = [n for n, node in module.names.items() if isinstance(node, ast.ClassDef)]
    imported = [n for n in module.imports if n[:1].isupper()]
    return (
        f"{key}={dotted}: {module.path} has no class '{name}'"
        f"{did_you_mean(name, [*classes, *imported])}"
    )


def _names_module(dotted: str, key: str) -> str | None:
    """Return a sentence if a name that must be a class's is a module's."""
    if find_module(dotted) is None:
        return None
    module = load_module(dotted)
    names = module.names.items() if module else ()
    class_name = next((name for name, node in names if isinstance(node, ast.ClassDef)), None)
    example = f", as in {dotted}.{class_name}" if class_name else ""
    return f"{key}={dotted} is a module; name a class in it{example}"


def _missing_module(spelled: str, module: str) -> str:
    return (
        f"{spelled}: there is no module '{module}' on Python's path; run from the folder that "
        f"holds it, or install it"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFacts:
    """Facts that a job's source states; None if it does not state them.

    Attributes:
        coupled: the loss is one of all embeddings.
        own_optimizer: the job builds its optimizer.
        own_rate: the job computes the learning rate of each update.
        talks_in_window: the loss calls collectives.
    """

    framework: str | None = None
    metric_count: int | None = None
    coupled: bool = False
    own_optimizer: bool | None = None
    own_rate: bool = False
    talks_in_window: bool = False


@cached
def check_target(dotted: str) -> TargetFacts:
    """Check that the class of `job._target_` exists, and read the facts that a plan needs.

    Raises:
        JobError: the module or class does not exist, or the name means no class.
    """
    top = dotted.split(".", maxsplit=1)[0]
    if "." in dotted and find_module(top) is None:
        raise JobError(_missing_module(f"job._target_={dotted}", dotted.rpartition(".")[0]))
    if sentence := missing_class(dotted, "job._target_"):
        raise JobError(sentence)
    if top in sys.stdlib_module_names:
        raise JobError(f"job._target_={dotted} is a part of Python, not a job")
    if isinstance(_find(dotted), Definition):
        raise JobError(f"job._target_={dotted} is a function; it must be a class")
    source = find_class(dotted)
    if source is None:
        return TargetFacts()
    names = getattr(source.members.get("metric_names"), "value", None)
    default = "torch" if source.complete else None
    return TargetFacts(
        framework=source.constant("framework") if "framework" in source.members else default,
        metric_count=len(names.elts) if isinstance(names, ast.Tuple | ast.List) else None,
        coupled=source.members.keys() >= set(COUPLED_METHODS),
        own_optimizer=_builds_optimizer(source),
        own_rate=isinstance(source.members.get("learning_rate"), Definition),
        talks_in_window=bool(source.constant("talks_in_window")),
    )


def check_constructor(dotted: str, arguments: Collection[str]) -> None:
    """Check the arguments of a job, `job.*`, by the source of its constructor, if that tells.

    Raises:
        JobError: one that it does not take, or one that it needs is absent.
    """
    source = find_class(dotted)
    if source is None or source.decorated or "__new__" in source.members:
        return
    method = source.members.get("__init__")
    if not isinstance(method, ast.FunctionDef):
        if source.complete and method is None:
            refuse_arguments(dotted, arguments, {}, takes_any=False)
        return
    if method.decorator_list:
        return
    listed = method.args
    positional = [*listed.posonlyargs, *listed.args][1:]  # without self
    needed = len(positional) - min(len(listed.defaults), len(positional))
    known = {item.arg: number < needed for number, item in enumerate(positional)}
    named = zip(listed.kwonlyargs, listed.kw_defaults, strict=True)
    known |= {item.arg: default is None for item, default in named}
    refuse_arguments(dotted, arguments, known, takes_any=listed.kwarg is not None)


def refuse_arguments(
    dotted: str, arguments: Collection[str], known: Mapping[str, bool], *, takes_any: bool
) -> None:
    """Raise `JobError` for arguments that a job's constructor does not take, or lacks.

    Args:
        arguments: the keys of `job`, without `_target_`.
        known: by name whether it is needed.
        takes_any: it has `**kwargs`.
    """
    for key in arguments:
        if key not in known and not takes_any:
            hint = did_you_mean(key, [*known])
            raise JobError(f"{dotted} takes no argument '{key}' (from job.{key}){hint}")
    for key, needed in known.items():
        if needed and key not in arguments:
            raise JobError(f"{dotted} needs the argument '{key}'; add job.{key}=…")


def builds_optimizer(dotted: str) -> bool | None:
    """Tell whether the job of this name builds its own optimizer; None if its source does not."""
    source = find_class(dotted)
    return _builds_optimizer(source) if source else None


def _builds_optimizer(source: ClassSource) -> bool | None:
    method = source.members.get("optimizer")
    if method is None:
        return False if source.complete else None
    # A method that may return None leaves the choice to the configuration.
    returned = [ast.unparse(n.value or n) for n in ast.walk(method) if isinstance(n, ast.Return)]
    ends = isinstance(method, Definition) and isinstance(method.body[-1], ast.Return | ast.Raise)
    if not ends or any(re.search(r"\b(None|super|return)\b", text) for text in returned):
        return None
    return bool(returned)


ELF = b"\x7fELF"
PYTHONS = ("python", "python3")
MOST_NAMED = 200


def check_program(program: ProgramConfig) -> None:
    """Refuse a program that cannot be started. Raises `JobError`."""
    target = program.target
    if program.is_module:
        spec = find_module(target)
        if spec is None:
            raise JobError(_missing_module(f"-m {target}", target))
        if spec.submodule_search_locations is None:
            load_module(target)  # raises if it is no Python
        elif find_module(f"{target}.__main__") is None:
            raise JobError(f"-m {target}: the package has no __main__, so it cannot be run")
        return
    path = expand_user(target)
    if not os.path.exists(path):  # noqa: PTH110  # no error where one may not look
        if os.sep in target or shutil.which(target) is None:
            raise JobError(_describe_missing(target, path))
    elif path.is_dir():
        raise JobError(
            f"{target} is a folder; to run a package of Python: -m {path.name.replace('-', '_')}"
        )
    elif not path.is_file() or not os.access(path, os.R_OK):
        raise JobError(f"{target} is no file that could be run by you")
    elif path.suffix == ".py":
        _check_python(target, path)
    else:
        _check_executable(target, path)


def copied_script(program: ProgramConfig) -> Path | None:
    """Return the script that a copy of the code has to hold; None for modules, binaries and
    programs of the machine.
    """
    script = script_of(program)
    if script is None or str(script.parent) in os.get_exec_path():
        return None
    with script.open("rb") as file:
        return None if file.read(len(ELF)) == ELF else script


def script_of(program: ProgramConfig) -> Path | None:
    """Return the user's file that is run; None for modules and programs on PATH."""
    if program.is_module or not (os.sep in program.target or Path(program.target).exists()):
        return None
    return Path(os.path.abspath(expand_user(program.target)))  # noqa: PTH100  # keeps links


def is_this_python(word: str) -> bool:
    """Return True if a program's name means the running Python.

    >>> is_this_python(sys.executable), is_this_python("train.py")
    (True, False)
    """
    path = shutil.which(word) if Path(word).name.startswith(PYTHONS) else None
    return path is not None and Path(path).resolve() == Path(sys.executable).resolve()


def _check_python(spelled: str, path: Path) -> None:
    """Check that a script is Python, as every rank would find out."""
    try:
        with warnings.catch_warnings(action="ignore"):  # Python repeats them in the run
            ast.parse(path.read_bytes(), spelled)
    except (SyntaxError, ValueError) as error:
        at = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        raise JobError(f"{spelled} is no Python: {at}{message}") from error


def _check_executable(spelled: str, path: Path) -> None:
    """Check a script in another language, or a binary, by the kernel's rules."""
    with path.open("rb") as file:
        first = file.readline(256)
    if not first.startswith((b"#!", ELF)):
        raise JobError(
            f"{spelled} does not say what runs it: its first line must be as in #!/bin/bash, or "
            f"name the interpreter: -- bash {spelled}"
        )
    if not os.access(path, os.X_OK):
        raise JobError(f"{spelled} may not be executed; chmod +x {spelled}")


def _describe_missing(spelled: str, path: Path) -> str:
    sentence = f"there is no program {spelled}"
    if os.sep not in spelled and path.suffix == "":
        sentence += " here or on PATH"
    try:
        names = [entry.name for entry in os.scandir(path.parent)][:MOST_NAMED]
    except OSError:  # the folder is not there either
        return f"{sentence}: there is no folder {path.parent}"
    name = nearest(path.name, names)
    return sentence + (f"; did you mean {path.with_name(name)}?" if name else "")
