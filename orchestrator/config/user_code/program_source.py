"""Look at a program without running it: is it there, and can it be started?"""

from __future__ import annotations

import ast
import os
import re
import shutil
import stat
import sys
import warnings
from pathlib import Path

from orchestrator.config.user_code.class_source import find_module, load_module
from orchestrator.config.user_code.program_section import Program
from orchestrator.errors import JobError, nearest

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
