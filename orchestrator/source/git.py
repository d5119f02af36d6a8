"""A folder of source as git sees it: its commit, differences from it, files that it knows.

Files that hold secrets by their names are left out.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from fnmatch import translate
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFolderError

SECRET_FOLDERS = (".ssh", ".aws", ".gnupg", ".kube", ".azure", ".docker", "gcloud", ".gcloud")
SECRET_NAMES = (
    ".env",
    ".env.*",
    "*.env",
    ".netrc",
    "_netrc",
    ".pgpass",
    ".my.cnf",
    ".pypirc",
    ".npmrc",
    ".git-credentials",
    ".htpasswd",
    ".dockercfg",
    ".s3cfg",
    ".boto",
    ".vault*pass*",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    "*.pem",
    "*.key",
    "*.ppk",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.keystore",
    "*.kdbx",
    "*.gpg",
    "*.tfvars",
    "*.tfstate",
    "kubeconfig",
    "credentials",
    "credentials.*",
    ".credentials*",
    "client_secret*",
    "service*account*.json",
    "secret",
    "secrets",
    "secret.*",
    "secrets.*",
    "token",
    "token.*",
    ".token",
    "*.token",
    "api_key*",
    "apikey*",
    "password*.txt",
)
_SECRET = re.compile("|".join(translate(name) for name in SECRET_NAMES), re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return whether a file of this name, with `/` between folders, holds secrets by convention.

    >>> is_secret("conf/.env"), is_secret(".AWS/config"), is_secret("jobs/secrets.py")
    (True, True, False)
    """
    *folders, last = name.split("/")
    if last.endswith(".py"):
        return False
    return any(f.lower() in SECRET_FOLDERS for f in folders) or _SECRET.match(last) is not None


DIFF_LIMIT_BYTES = 1 << 20


class GitRefusal(RunFolderError):
    """A repository that git does not read, as one that belongs to another account."""


def code_state(folder: Path) -> dict[str, Any]:
    """Return the folder's commit and its difference from it; `commit` is None without git.

    The difference includes Python files that no commit holds, `untracked`. It leaves out files that
    hold secrets by their name; see `is_secret`. `error` says why git gave no answer, where there is
    a repository; else it is None.
    """
    commit, diff = b"", b""
    secrets = [*SECRET_NAMES, *(f"{name}/**" for name in SECRET_FOLDERS)]
    but = [f":(top,exclude,icase,glob)**/{pattern}" for pattern in secrets]
    error: str | None = None
    untracked: list[str] = []
    try:
        commit = _answer(folder, "rev-parse", "HEAD") or b""
        if commit:
            diff = _answer(folder, "diff", "--no-ext-diff", "HEAD", "--", ":/", *but) or b""
            untracked = _untracked(folder, but)
    except GitRefusal as refusal:
        error = str(refusal)
    for name in untracked:
        if len(diff) <= DIFF_LIMIT_BYTES:
            diff += _as_added(name, folder / name)
    return {
        "folder": str(folder),
        "commit": commit.decode().strip() or None,
        "diff": diff[:DIFF_LIMIT_BYTES].decode("utf-8", "replace"),
        "diff_cut": len(diff) > DIFF_LIMIT_BYTES,
        "error": error,
        "untracked": untracked,
    }


GIT_S = 60.0
# git's messages where there is no repository, or no commit in it yet
NO_REPOSITORY = ("not a git repository (", "ambiguous argument 'head'", "bad revision 'head'")


def _untracked(folder: Path, but: Sequence[str]) -> list[str]:
    """Return Python files of the folder that no commit holds: all that git does not ignore, and of
    ignored ones those next to the job.
    """
    listed = [
        _answer(folder, "ls-files", "--others", "-z", *options, *but) or b""
        for options in (("--exclude-standard", "--", "*.py"), ("--", ":(glob)*.py"))
    ]
    return sorted({os.fsdecode(name) for names in listed for name in names.split(b"\0") if name})


def _as_added(name: str, path: Path) -> bytes:
    """Return a file as git's diff would have it if it were added."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        return f"diff --git {name}: cannot be read: {error.strerror}\n".encode()
    head = f"diff --git a/{name} b/{name}\nnew file\n--- /dev/null\n+++ b/{name}\n"
    added = b"".join(b"+" + line + b"\n" for line in lines)
    return head.encode() + f"@@ -0,0 +1,{len(lines)} @@\n".encode() + added


def _answer(folder: Path, *arguments: str) -> bytes | None:
    """Return the output of a git command about the folder; None without a repository.

    Raises:
        GitRefusal: there is a repository, but no answer.
    """
    own = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=own,
            capture_output=True,
            timeout=GIT_S,
            check=False,
        )
    except FileNotFoundError as error:
        if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
            return None
        raise GitRefusal(f"{folder} is in a git repository, but there is no git here") from error
    except subprocess.TimeoutExpired as error:
        raise GitRefusal(f"git gave no answer on {folder} within {GIT_S:.0f} s") from error
    stderr = done.stderr.decode("utf-8", "replace").strip()
    if done.returncode == 0:
        if unanswered := UNANSWERED.search(stderr):
            raise GitRefusal(f"git does not read all of {folder}: {unanswered[0]}")
        return done.stdout
    if any(phrase in stderr.lower() for phrase in NO_REPOSITORY):
        return None
    message = f"git does not read {folder}: {stderr.splitlines()[0] if stderr else 'no message'}"
    if command := SAFE_DIRECTORY.search(stderr):  # it belongs to another account
        message += f"; if you trust it, type: {command[0]}"
    raise GitRefusal(message)


# A folder that git goes on without; one that is denied or gone has no files for the run.
UNANSWERED = re.compile(
    r"could not open directory '.*': (?!Permission denied|No such file|Not a directory).*"
)
SAFE_DIRECTORY = re.compile(r"git config --global --add safe\.directory \S.*")


def listed_files(root: Path) -> list[str] | None:
    """Return files below `root` that git knows or would add; None without a repository.

    Raises:
        GitRefusal: there is one, but git does not say which files it ignores.
    """
    listed = _answer(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is None:
        return None
    return sorted({os.fsdecode(name) for name in listed.split(b"\0") if name})
