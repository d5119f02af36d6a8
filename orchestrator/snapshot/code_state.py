"""Which code it is: a source folder's commit and what differs from it, for environment.json.

A submission that keeps a copy of the code describes it when the copy is made. The ranks may start
days later, when the folder holds something else.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.snapshot.secret_files import git_without_secrets

GIT_TIMEOUT_S = 20
DIFF_LIMIT_BYTES = 1 << 20


def is_installed(path: Path) -> bool:
    """Whether a module's file lies in one of Python's own folders (site-packages and the like)."""
    return any(path.is_relative_to(folder) for folder in _own_folders())


@cache
def _own_folders() -> frozenset[str]:
    return frozenset(map(sysconfig.get_path, ("purelib", "platlib", "stdlib", "platstdlib")))


def folder_of(target: type) -> Path:
    """Where a class's source lies; the working folder for what is installed or typed in."""
    file = getattr(sys.modules.get(target.__module__), "__file__", None)
    path = Path(file).absolute() if file else None
    return Path.cwd() if path is None or is_installed(path) else path.parent


def code_state(folder: Path) -> dict[str, Any]:
    """The folder's commit and its difference from it; `commit` is None where git knows neither.

    What `secret_files` names is in no diff.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    diff = _git(folder, "diff", "--no-ext-diff", "HEAD", *git_without_secrets()) or ""
    return {
        "folder": str(folder),
        "commit": commit.strip() if commit else None,
        "diff": diff[:DIFF_LIMIT_BYTES],
        "diff_cut": len(diff) > DIFF_LIMIT_BYTES,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command about the folder; None without git or a repository."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder, capture_output=True, text=True, errors="replace",
            timeout=GIT_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
