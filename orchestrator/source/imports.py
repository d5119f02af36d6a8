"""Files that a module imports, directly or through others, found in the source.

Nothing is imported for it. Files of the user's own count, installed modules do not.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.source.modules import PACKAGE, find_module, is_installed, origin_of

DYNAMIC_IMPORTS = frozenset(
    {
        "__import__",
        "exec",
        "get_class",
        "import_module",
        "instantiate",
        "iter_modules",
        "run_module",
        "run_path",
        "spec_from_file_location",
        "walk_packages",
    }
)
"""Calls that import modules which the source does not name."""


def imported_files(files: Mapping[Path, str]) -> tuple[dict[Path, str], bool]:
    """Return these files and all that they import, those inside functions too, and whether these
    are certainly all: not if one of them imports by computed names.

    Args:
        files: with the names of their modules.
    """
    imported, complete = dict(files), True
    todo = list(imported.items())
    while todo:
        path, module = todo.pop()
        if path.suffix != ".py":
            complete = complete and path.suffix in (".so", ".pyd")
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):  # the import itself reports the error
            continue
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        complete = complete and not any(map(_is_dynamic_import, ast.walk(tree)))
        for name in _imported_names(tree, package):
            new = {p: m for p, m in files_of_module(name).items() if p not in imported}
            imported |= new
            todo.extend(new.items())
    return imported, complete


def _imported_names(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):  # `b` of `from a import b` may be a module
            yield from (f"{origin_of(node, package)}.{alias.name}" for alias in node.names)


def _is_dynamic_import(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):  # `exec` of other objects is no import
        return node.func.attr in DYNAMIC_IMPORTS - {"exec"}
    return isinstance(node.func, ast.Name) and node.func.id in DYNAMIC_IMPORTS


def files_of_module(dotted: str) -> dict[Path, str]:
    """Return the files of a module and of the packages above it, with their modules' names.

    Empty for installed modules and for this package. The last parts of `dotted` may be no modules.
    """
    files: dict[Path, str] = {}
    parts = dotted.split(".")
    if parts[0] in sys.stdlib_module_names:
        return files
    if parts[0] == PACKAGE.name and parts[1:2] != ["jobs"]:
        return files
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        spec = find_module(name)
        if spec is None:
            break
        if spec.origin is None:  # a namespace, whose folders may be anywhere
            continue
        if not Path(spec.origin).exists() or is_installed(Path(spec.origin).absolute()):
            break
        if spec.has_location:
            files[Path(spec.origin).absolute()] = name
    files.pop(PACKAGE / "__init__.py", None)
    return files
