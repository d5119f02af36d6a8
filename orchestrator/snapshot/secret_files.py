"""Files that hold secrets by convention: never copied into a run folder, nor shown in a diff of it.

By name only; what is in a file is not looked at. Python's own sources are never among them, since a
run would not start without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate

FOLDERS = (".ssh", ".aws", ".gnupg", ".kube", ".azure", ".docker", "gcloud", ".gcloud")
NAMES = (
    ".env", ".env.*", "*.env", ".netrc", "_netrc", ".pgpass", ".my.cnf", ".pypirc", ".npmrc",
    ".git-credentials", ".htpasswd", ".dockercfg", ".s3cfg", ".boto", ".vault*pass*",
    "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.ppk", "*.p12", "*.pfx",
    "*.jks", "*.keystore", "*.kdbx", "*.gpg", "*.tfvars", "*.tfstate", "kubeconfig",
    "credentials", "credentials.*", ".credentials*", "client_secret*", "service*account*.json",
    "secret", "secrets", "secret.*", "secrets.*", "token", "token.*", ".token", "*.token",
    "api_key*", "apikey*", "password*.txt",
)  # fmt: skip
_SECRET = re.compile("|".join(translate(name) for name in NAMES), re.IGNORECASE)
NAMED_AT_MOST = 3


def is_secret(name: str) -> bool:
    """Whether a file of this name, with `/` between folders, holds secrets by convention.

    >>> is_secret("conf/.env"), is_secret(".AWS/config"), is_secret("jobs/secrets.py")
    (True, True, False)
    """
    *folders, last = name.split("/")
    if last.endswith(".py"):
        return False
    return any(f.lower() in FOLDERS for f in folders) or _SECRET.match(last) is not None


def git_without_secrets() -> list[str]:
    """A pathspec for git: all of the repository but such files."""
    wide = "top,exclude,icase,glob"
    names = [f":({wide})**/{name}" for name in NAMES]
    return ["--", ":/", *names, *(f":({wide})**/{folder}/**" for folder in FOLDERS)]


def told(left_out: Iterable[str]) -> str:
    """A few of the names, and how many more there are.

    >>> told(["c", "a", "b", "d", "e"])
    'a, b, c and 2 more'
    """
    names = sorted(left_out)
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more
