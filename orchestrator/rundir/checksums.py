"""Checksums inside the files that a resume reads, so that damage is found and never obeyed.

A JSON table ends with the key `sha256`: the digest of the file's name and of all text before it.
config.yaml ends with a comment line that holds the run's identity and a digest of the text and the
identity; a checkpoint's state.json names the same identity and holds the digests of its tensors'
files. A checksum protects from damage, not from forgery.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFolderError

KEY = "sha256"
_BEGIN = f'\n "{KEY}": "'
_END = '"\n}\n'
_LINE = re.compile(r"\A(.*\n)# run ([0-9a-f]{32}), sha256 ([0-9a-f]{64})\n\Z", re.DOTALL)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def to_json_text(name: str, value: Mapping[str, Any]) -> str:
    """Return the text of a JSON file of this name, with its checksum."""
    head = json.dumps({**value, KEY: ""}, indent=1).removesuffix(_BEGIN + '"\n}')
    return f"{head}{_BEGIN}{_digest(name, head)}{_END}"


def parse_json(path: Path, text: str) -> dict[str, Any]:
    """Return the table in a JSON file's text, without its checksum.

    Raises:
        RunFolderError: its checksum is wrong or missing.
    """
    head, begin, end = text.rpartition(_BEGIN)
    if not begin:
        raise RunFolderError(f"{path} is damaged: its digest is missing")
    if end != _digest(path.name, head) + _END:
        raise RunFolderError(f"{path} is damaged: its digest is not that of its content")
    value: dict[str, Any] = json.loads(text)
    del value[KEY]
    return value


def with_identity(text: str, identity: str) -> str:
    """Return config.yaml's text with its last line: the identity and the checksum.

    Args:
        identity: of the run, 32 hexadecimal digits.
    """
    return f"{text}# run {identity}, sha256 {_digest(identity, text)}\n"


def identity_in(path: Path, text: str) -> str:
    """Return the identity in the last line of config.yaml.

    Raises:
        RunFolderError: the line is missing, or its digest is not that of the text.
    """
    found = _LINE.match(text)
    if found is None:
        raise RunFolderError(f"{path} is damaged: its digest is missing")
    content, identity, digest = found.groups()
    if digest != _digest(identity, content):
        raise RunFolderError(f"{path} is damaged: its digest is not that of its content")
    return identity
