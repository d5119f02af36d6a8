"""Checkpoints: written so that a crash at any point leaves the last good one, checked when read.

A checkpoint is a folder `update-<n>`: after n updates. It is made under another name, every file
and the folder are forced to disk, and one rename makes it appear. `state.json` holds the digests.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from orchestrator.errors import RunFolderError
from orchestrator.rundir import read_json, write_json

STATE = "state.json"
WEIGHTS = "weights.safetensors"
PREFIX = "update-"


class Saves(Protocol):
    """The part of an engine that checkpoints need."""

    def save_state(self, folder: Path) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint: `updates` done, `samples` seen, the engine's own `extra`."""

    folder: Path
    updates: int
    samples: int
    extra: dict[str, Any]


def _digest(path: Path) -> str:
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            whole.update(block)
    return whole.hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(checkpoints: Path, engine: Saves, *, updates: int, samples: int, keep: int) -> Path:
    """Write a checkpoint and remove all but the newest `keep`. Raises `OSError` (a full disk, say)
    with nothing but the earlier checkpoints left.
    """
    final = checkpoints / f"{PREFIX}{updates:09d}"
    if final.exists():  # met again after a resume from an earlier one
        try:
            load(final)
        except RunFolderError:  # it was damaged and passed over; what is written now replaces it
            shutil.rmtree(final)
        else:
            return final
    partial = checkpoints / f".partial-{updates:09d}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(mode=0o700)
        extra = engine.save_state(partial)
        files = sorted(partial.iterdir())
        for path in files:
            _to_disk(path)
        digests = {path.name: _digest(path) for path in files}
        state = {"updates": updates, "samples": samples, "files": digests, "extra": extra}
        write_json(partial / STATE, state)
        _to_disk(partial)
        partial.rename(final)
        _to_disk(checkpoints)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except SafetensorError as error:  # how safetensors reports a disk's errors
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(errno.EIO, str(error)) from error
    for old in complete(checkpoints)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def complete(checkpoints: Path) -> list[Path]:
    """Folders of complete checkpoints, oldest first."""
    return sorted(p for p in checkpoints.glob(f"{PREFIX}*") if (p / STATE).is_file())


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint's state and check every digest. Raises `RunFolderError` when one is off."""
    state = read_json(folder / STATE)
    if state is None:
        raise RunFolderError(f"{folder} is not a checkpoint: it has no {STATE}")
    for name, expected in state["files"].items():
        path = folder / name
        if not path.is_file() or _digest(path) != expected:
            raise RunFolderError(f"{path} is damaged: its digest is not the one in {STATE}")
    return Checkpoint(
        folder=folder, updates=state["updates"], samples=state["samples"], extra=state["extra"]
    )


def newest(checkpoints: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint, and a sentence for each newer one that had to be passed over."""
    passed_over: list[str] = []
    for folder in reversed(complete(checkpoints)):
        try:
            return load(folder), passed_over
        except RunFolderError as error:
            passed_over.append(f"{error}; going on from an earlier checkpoint")
    return None, passed_over
