"""Seals: a digest inside each file that a run is gone on with, so that damage is never obeyed.

A sealed JSON file ends with the key `sha256`: the digest of its own name and of all text before it.
config.yaml ends with a comment line that holds the run's identity and a digest of the text and of
that identity; a checkpoint's state.json names the same identity, and has the digests of its
tensors' files. So every bit that a resume reads is under a digest, and no file can stand in for
another. A seal is against damage, not against forgery: who may write in a run folder may seal, too.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFolderError

KEY = "sha256"
_BEGIN = f',\n "{KEY}": "'
_END = '"\n}\n'
IDENTITY_DIGITS, OLDER_DIGITS = 32, 16
_RUN = f"[0-9a-f]{{{IDENTITY_DIGITS}}}|[0-9a-f]{{{OLDER_DIGITS}}}"
_LINE = re.compile(rf"\A(.*\n)# run ({_RUN}), sha256 ([0-9a-f]{{64}})\n\Z", re.DOTALL)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def sealed_json(name: str, value: Any) -> str:
    """The text of a JSON file of this name; a table that is not empty is sealed."""
    body = json.dumps(value, indent=1)
    if not isinstance(value, dict) or not value:
        return body + "\n"
    return f"{body[:-2]}{_BEGIN}{_digest(name, body)}{_END}"


def unsealed_json(path: Path, text: str, *, must: bool = False) -> Any:
    """The value of a JSON file. A seal, where there is one, has to be whole.

    Args:
        must: the file has to have a seal.

    Raises:
        RunFolderError: it is no JSON, its digest is not that of its content, or it has none though
            it must.
    """
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error
    except RecursionError as error:
        raise RunFolderError(f"{path} is damaged: it is nested too deep") from error
    head, begin, end = text.rpartition(_BEGIN)
    if begin and end == _digest(path.name, head + "\n}") + _END:
        del value[KEY]
    elif isinstance(value, dict) and KEY in value:
        raise RunFolderError(f"{path} is damaged: its digest is not that of its content")
    elif must:
        raise RunFolderError(f"{path} is damaged: its digest is missing")
    return value


def new_identity() -> str:
    """What tells this run from all others."""
    return secrets.token_hex(IDENTITY_DIGITS // 2)


def is_in_every_file(identity: str) -> bool:
    """Whether the run's plan, submission, result and resumes name it, too.

    They do not in runs of the first version that had seals, whose identities were shorter. How long
    one is stands under the seal of config.yaml, so damage makes no run an older one.
    """
    return len(identity) == IDENTITY_DIGITS


def sealed_config(text: str, identity: str) -> str:
    """The text of config.yaml with its last line."""
    return f"{text}# run {identity}, sha256 {_digest(identity, text)}\n"


def identity_in(path: Path, text: str) -> str | None:
    """The identity in the last line of config.yaml; None where there is no such line.

    Raises:
        RunFolderError: the digest in it is not that of the text.
    """
    found = _LINE.match(text)
    if found is None:
        return None
    content, identity, digest = found.groups()
    if digest != _digest(identity, content):
        raise RunFolderError(f"{path} is damaged: its digest is not that of its content")
    return identity
