"""A reader of Python source: modules, classes and their members, without importing them.

The submitting side imports no framework and runs no user code. What the source of a class does not
tell is not known here (None): the workers, which import it, know.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from orchestrator.errors import JobError

Value = TypeVar("Value")
Given = ParamSpec("Given")
Definition = ast.FunctionDef | ast.AsyncFunctionDef
OWN_BASES = ("orchestrator.Job", "orchestrator.job.Job")
BASES_WITHOUT_MEMBERS = ("object", "Protocol", "Generic", "ABC")

PACKAGE = Path(__file__).resolve().parent.parent
INTERPRETER_FOLDERS = frozenset(
    map(sysconfig.get_path, ("purelib", "platlib", "stdlib", "platstdlib"))
)
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
"""Folders of packages, also those of a user, another environment or an environment module."""


def is_in_interpreter(path: Path) -> bool:
    """Return whether a module's file is in this interpreter's own folders."""
    return any(path.is_relative_to(folder) for folder in INTERPRETER_FOLDERS)


def is_installed(path: Path) -> bool:
    """Return whether a module's file is in a folder of installed packages, or is Python's own."""
    return is_in_interpreter(path) or not PACKAGE_FOLDERS.isdisjoint(path.parts)


def folder_of(target: type) -> Path:
    """Return a class's source folder; of an installed or typed-in class the working folder."""
    file = getattr(sys.modules.get(target.__module__), "__file__", None)
    path = Path(file).absolute() if file else None
    return Path.cwd() if path is None or is_installed(path) else path.parent


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


def loaded_files(folder: Path) -> dict[str, Path]:
    """Return the files in a folder that this process has imported, by their modules' names: not
    those of installed modules or of this package.
    """
    below = os.path.join(folder, "")  # noqa: PTH118  # paths are slow for 2,000 modules
    files: dict[str, Path] = {}
    for name, module in list(sys.modules.items()):  # a copy: other threads may import
        file = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] == PACKAGE.name:
            continue
        if not os.path.abspath(file).startswith(below):  # noqa: PTH100
            continue
        path = Path(file).absolute()
        if not is_installed(path) and path.is_file():
            files[name] = path
    return files


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
def find_definition(dotted: str, depth: int = 8) -> ast.stmt | ClassSource | None:
    """Find the statement or class that a dotted name means; None if the source does not tell."""
    module_name, _, name = dotted.rpartition(".")
    module = load_module(module_name) if module_name and depth else None
    if module is None:
        return None
    if name in module.imports:
        return find_definition(module.imports[name], depth - 1)
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
        base = find_definition(dotted_base, depth - 1)
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
    source = find_definition(dotted)
    return source if isinstance(source, ClassSource) else None
