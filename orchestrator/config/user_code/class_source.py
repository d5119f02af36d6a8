"""A class as its source has it: found by its dotted name, with its bases, and never imported."""

from __future__ import annotations

import ast
import builtins
import contextlib
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.config.user_code.returned import DEFINITIONS
from orchestrator.errors import JobError, did_you_mean

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
