"""Checks of a user's job class or program by its source, without importing it.

The submitting side imports no framework and runs no user code, so it checks only that a job's
module and class exist, and reads the class attributes that a plan needs. The workers, which build
the job, check everything else.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.program import ProgramConfig
from orchestrator.errors import JobError, did_you_mean, expand_user, nearest
from orchestrator.job import COUPLED_METHODS
from orchestrator.source.imports import files_of_module, imported_files
from orchestrator.source.modules import (
    PACKAGE,
    ClassSource,
    Definition,
    cached,
    find_class,
    find_definition,
    find_module,
    load_module,
)


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
    if isinstance(find_definition(dotted), Definition):
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


CURRENT_RUN = "current_run"
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


@cached
def source_files(target: str | ProgramConfig) -> tuple[dict[Path, str], bool]:
    """Return the files of the user's own that a job or program imports, with its own and the names
    of their modules, and whether these are certainly all.

    Args:
        target: a job's class, by its dotted name, or a program.
    """
    before, files = list(sys.path), dict[Path, str]()
    if isinstance(target, str):
        files |= files_of_module(target.rpartition(".")[0])
    elif target.is_module:
        files |= files_of_module(target.target)
        files |= files_of_module(f"{target.target}.__main__")
    elif script := copied_script(target):
        files[script] = "__main__"
        sys.path.insert(0, str(script.parent))  # as Python does when it runs the script
    try:
        return imported_files(files)
    finally:
        sys.path[:] = before


@cached
def calls_current_run(program: ProgramConfig, methods: Collection[str]) -> bool:
    """Return whether a Python program, or a module that it imports, calls one of these methods of
    `current_run`, as its source has it.
    """
    files, _ = source_files(program)
    return any(_calls_current_run(file, methods) for file in files if file.suffix == ".py")


def _calls_current_run(path: Path, methods: Collection[str]) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError, ValueError):  # the import itself reports the error
        return False
    imports = any(
        alias.name.partition(".")[0] == PACKAGE.name or alias.name == CURRENT_RUN
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    )
    return imports and any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in methods
        for node in nodes
    )


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
