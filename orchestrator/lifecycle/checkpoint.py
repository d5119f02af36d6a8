"""Checkpoints: written so that a crash at any point leaves the last good one, checked when read.

A checkpoint is a folder `update-<n>`: after n updates. It is made under another name, every file
and the folder are forced to disk, and one rename makes it appear. `state.json` is sealed, names the
run, and holds the digests of all other files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError

from orchestrator.errors import RunFolderError
from orchestrator.run_folder.files import blocks, is_folder, make_folder, names_in, remove
from orchestrator.run_folder.rundir import (
    INITIAL_BYTES,
    INITIAL_DIGEST,
    RunDir,
    read_json,
    write_json,
)
from orchestrator.run_warnings import warn

STATE = "state.json"
WEIGHTS = "weights.safetensors"
PREFIX = "update-"
PARTIAL = ".partial-"
NAME = re.compile(rf"{PREFIX}([0-9]{{1,18}})")


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


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    whole = hashlib.sha256()
    for block in blocks(path):
        whole.update(block)
    return whole.hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder_of(checkpoints: Path, updates: int) -> Path:
    """Where the checkpoint after so many updates is."""
    return checkpoints / f"{PREFIX}{updates:09d}"


def save(
    checkpoints: Path,
    engine: Saves,
    *,
    updates: int,
    samples: int,
    keep: int,
    run: str | None = None,
) -> Path:
    """Write a checkpoint and remove all but the newest `keep`. Raises `OSError` (a full disk, say)
    with nothing but the earlier checkpoints left.

    Args:
        run: the run's identity; None for one that was made before runs had any.
    """
    final = folder_of(checkpoints, updates)
    if os.path.lexists(final):  # met again after a resume from an earlier one
        try:
            load(final, run)
        except RunFolderError:  # it was damaged and passed over; what is written now replaces it
            remove(final)
        else:
            return final
    partial = checkpoints / f"{PARTIAL}{updates:09d}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        make_folder(partial)
        extra = engine.save_state(partial)
        files = sorted(partial.iterdir())
        for path in files:
            _to_disk(path)
        digests = {path.name: digest_of(path) for path in files}
        lengths = {path.name: path.stat().st_size for path in files}
        state = {
            "updates": updates, "samples": samples, "run": run, "files": digests,
            "bytes": lengths, "extra": extra,
        }  # fmt: skip
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


def make_again(checkpoints: Path) -> None:
    """Make the folder of a run's checkpoints where somebody has removed it, and say so."""
    if not is_folder(checkpoints):
        make_folder(checkpoints)
        name = checkpoints.name
        warn(f"there was no folder {name}, so no checkpoint either: it begins at update 0")


def remove_partial(checkpoints: Path) -> None:
    """Remove what attempts that were killed while they saved have left.

    For the newest attempt, once it has the right to write: an older one that still does shall fail.
    """
    for path in checkpoints.glob(f"{PARTIAL}*"):
        remove(path)


def complete(checkpoints: Path) -> list[Path]:
    """Folders of checkpoints, oldest first. They appear whole, so what lacks a file is damaged."""
    found = [name for name in names_in(checkpoints) if NAME.fullmatch(name)]
    return [checkpoints / name for name in sorted(found, key=lambda name: int(name[len(PREFIX) :]))]


def load(folder: Path, run: str | None = None, *, contents: bool = True) -> Checkpoint:
    """Read a checkpoint's state and check every digest.

    Args:
        run: the identity of the run that it has to be of; None for a run that has none.
        contents: also read the files whose digests the state holds.

    Raises:
        RunFolderError: it is damaged, or another run's, or one after other updates.
    """
    try:
        return _load(folder, run, contents=contents)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be read: {error.strerror}") from error


def _load(folder: Path, run: str | None, *, contents: bool) -> Checkpoint:
    is_folder(folder)
    state = read_json(folder / STATE, sealed=run is not None)
    if state is None:
        raise RunFolderError(f"{folder} is damaged: it has no {STATE}")
    found = NAME.fullmatch(folder.name)
    if found and int(found[1]) != state["updates"]:
        raise RunFolderError(
            f"{folder} is damaged: its {STATE} is of the checkpoint after {state['updates']} "
            "updates"
        )
    if state.get("run") != run:
        raise RunFolderError(f"{folder} is a checkpoint of another run, or its {STATE} is damaged")
    there = {name for name in names_in(folder) if name != STATE}
    if there != state["files"].keys():
        odd = min(there ^ state["files"].keys())
        raise RunFolderError(f"{folder / odd} is damaged: {STATE} and the folder differ about it")
    for name, length in state.get("bytes", {}).items():  # known at once, however much there is
        path = folder / name
        has = path.lstat().st_size
        if has != length and not path.is_symlink():
            raise RunFolderError(f"{path} is damaged: it has {has} bytes, not {length}")
    for name, expected in state["files"].items():
        if contents and digest_of(folder / name) != expected:
            raise RunFolderError(
                f"{folder / name} is damaged: its digest is not the one in {STATE}"
            )
    return Checkpoint(
        folder=folder, updates=state["updates"], samples=state["samples"], extra=state["extra"]
    )


def newest(
    checkpoints: Path, run: str | None = None, *, contents: bool = True
) -> tuple[Checkpoint | None, list[str]]:
    """The newest sound checkpoint, and a sentence for each newer one that had to be passed over.

    None: no checkpoint was written yet. The arguments are those of `load`.

    Raises:
        RunFolderError: there are checkpoints, but none is sound. To begin again from nothing is
            not what somebody wants who goes on with a run.
    """
    passed_over: list[str] = []
    for folder in reversed(complete(checkpoints)):
        try:
            return load(folder, run, contents=contents), passed_over
        except RunFolderError as error:
            passed_over.append(f"{error}; going on from an earlier checkpoint")
    if passed_over:
        first = passed_over[0].removesuffix("; going on from an earlier checkpoint")
        raise RunFolderError(
            f"no checkpoint in {checkpoints} is sound, so there is nothing to go on from: {first}. "
            f"Bring one back from a copy; or remove them all, and the run begins again at update 0"
        )
    return None, passed_over


def check_initial(run: RunDir) -> None:
    """Raises `RunFolderError` when the run's initial weights are not those that it began with."""
    told = run.read_submission()
    try:
        length = run.initial_weights.lstat().st_size
        sound = told.get(INITIAL_BYTES, length) == length  # so that none is read for ever
        found = digest_of(run.initial_weights) if sound else None
    except OSError as error:
        raise RunFolderError(f"{run.initial_weights} cannot be read: {error.strerror}") from error
    if found is None or found != told.get(INITIAL_DIGEST):
        raise RunFolderError(f"{run.initial_weights} is damaged: its digest is another one")


def refuse_beyond(run: RunDir, done: int, total: int | None) -> None:
    """Raises `RunFolderError` when more updates are done than the configuration asks for."""
    if total is not None and done > total:
        raise RunFolderError(
            f"{run.config} is an older one of this run: it asks for {total} updates, but the "
            f"newest checkpoint is after {done}; bring back the newest"
        )
