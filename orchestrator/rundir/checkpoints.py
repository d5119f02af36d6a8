"""Checkpoints, and the right to write them.

A checkpoint is a folder `update-<n>`: after n updates. It is made under another name, every file
and the folder are synced to disk, and one rename makes it appear, so a crash at any point leaves
the last good one. `state.json` names the run and holds the digests of all other files. Of a model
in shards it holds parts: files that one rank each has written.

Only the newest attempt of a run writes (`Fence`): when a node's slurmd dies, SLURM starts the job
again elsewhere, but the processes on the lost node run on.

A file that cannot be read may be sound: another node reads it, or this one does in a minute. So it
is read again for a while, and a checkpoint that was skipped is renamed, never removed.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar

from safetensors import SafetensorError

from orchestrator.errors import OrchestratorError, RunFolderError
from orchestrator.rundir.files import (
    FULL_ERRORS,
    await_readable,
    blocks,
    is_folder,
    make_folder,
    names_in,
    read_json,
    read_text,
    write_json,
)
from orchestrator.rundir.folder import BRANCH, INITIAL_DIGEST, RunDir
from orchestrator.rundir.program_link import write_number
from orchestrator.rundir.warnings import warn

STATE = "state.json"
WEIGHTS = "weights.safetensors"
PARTS = "part-*.safetensors"
MODEL = "model."  # begins the names of the weights in a part
EXTRA = "extra"  # in the metadata of other files: names of shared and complex tensors, as JSON
SHARDS = "DCP_SHARDING_INFO"  # in a part's metadata: the place of each shard, as JSON
PREFIX = "update-"
PARTIAL = ".partial-"
SKIPPED = "skipped-"  # before the name of a checkpoint that was skipped
NAME = re.compile(rf"{PREFIX}([0-9]{{1,18}})")
BEST: Final = "best"  # in references
READS = 5
T = TypeVar("T")


def part_name(part: int) -> str:
    """Return the file's name of a rank's part of a checkpoint, by its number from 0."""
    return f"part-{part:05d}.safetensors"


def weights_of(folder: Path) -> Path:
    """Return where a checkpoint's weights are: in one file, or in all files of this folder."""
    whole = folder / WEIGHTS
    return whole if whole.exists() or not (folder / part_name(0)).exists() else folder


class Saves(Protocol):
    """The part of an engine that checkpoints need."""

    def save_state(self, folder: Path) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint: `updates` done, `samples` seen, the engine's own `extra`, the digests
    of its `files` by their names, and measured `speeds`, a row for each rank: its speed and the
    digest of its node.
    """

    folder: Path
    updates: int
    samples: int
    extra: dict[str, Any]
    files: dict[str, str]
    speeds: list[list[float]] = field(default_factory=list[list[float]])

    def damage(self, names: Iterable[str]) -> str | None:
        """Return what is wrong with the first bad one of these files; None if all are as saved."""
        for name in names:
            path = self.folder / name
            try:
                if _patiently(file_sha256, path) != self.files[name]:
                    return f"{path} is damaged: its digest is not the one in {STATE}"
            except RunFolderError as error:  # a link
                return str(error)
            except OSError as error:
                return f"{path} cannot be read: {error.strerror}"
        return None


def _patiently(read: Callable[[Path], T], path: Path) -> T:
    """Return what `read` returns of a path, asked again while it cannot be read for now."""
    return await_readable(lambda: read(path), warn)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    whole = hashlib.sha256()
    for block in blocks(path):
        whole.update(block)
    return whole.hexdigest()


def write_part(
    folder: Path, engine: Saves, part: int | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Write a process's part of a checkpoint into the folder that `begin` made, synced to disk.

    Args:
        part: see `Engine.part`; None: all of the state, which no other process writes.

    Returns:
        What the engine gives besides, and the digests of the files by their names.
    """
    extra = engine.save_state(folder)
    if part is None:
        return extra, _synced_digests(sorted(folder.iterdir()))
    return extra, _synced_digests([folder / part_name(part)] if part >= 0 else [])


def _synced_digests(paths: Sequence[Path]) -> dict[str, str]:
    """Sync files that were just written to disk; return their SHA-256 by their names.

    At the same time: one waits for the disk, the other computes.
    """
    with ThreadPoolExecutor(2 * len(paths) or 1) as pool:
        synced, digests = pool.map(_sync, paths), pool.map(file_sha256, paths)
        list(synced)
        return {path.name: digest for path, digest in zip(paths, digests, strict=True)}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder_of(checkpoints: Path, updates: int) -> Path:
    """Return the folder of the checkpoint after so many updates."""
    return checkpoints / f"{PREFIX}{updates:09d}"


def save(
    checkpoints: Path,
    engine: Saves,
    *,
    updates: int,
    samples: int,
    keep: int,
    keep_every: int | None = None,
    run: str | None = None,
    speeds: Sequence[Sequence[float]] = (),
) -> Path:
    """Write a checkpoint and remove those that are not to be kept, see `commit_checkpoint`.

    Raises `OSError` (a full disk, say); then only the earlier checkpoints are left.

    Args:
        run: the run's identity; None in library mode.
        speeds: of ranks; see `Checkpoint`.
    """
    partial = begin(checkpoints, updates, run)
    if partial is not None:
        with _removed_on_error(partial):
            extra, files = write_part(partial, engine)
        about = {"updates": updates, "samples": samples, "run": run}
        about |= {"speeds": speeds} if speeds else {}
        commit_checkpoint(partial, about, files, extra, keep=keep, keep_every=keep_every)
    return folder_of(checkpoints, updates)


def partial_folder(checkpoints: Path, updates: int, writer: int) -> Path:
    """Return the folder in which a checkpoint is made by the process `writer`."""
    return checkpoints / f"{PARTIAL}{updates:09d}-{writer}"


def begin(checkpoints: Path, updates: int, run: str | None) -> Path | None:
    """Return a new folder to write a checkpoint's files into; None if there is a valid one after
    so many updates. `commit_checkpoint` comes next.
    """
    final = folder_of(checkpoints, updates)
    if os.path.lexists(final):  # reached again after a resume from an earlier one
        try:
            load(final, run)
        except RunFolderError:  # it was skipped; replace it
            _set_aside(final)
        else:
            return None
    partial = partial_folder(checkpoints, updates, os.getpid())
    with _removed_on_error(partial):
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial)
    return partial


def commit_checkpoint(
    partial: Path,
    about: Mapping[str, Any],
    files: Mapping[str, str],
    extra: Mapping[str, Any],
    *,
    keep: int,
    keep_every: int | None = None,
) -> None:
    """Make a checkpoint of what was written into a folder, and remove those that are not to be
    kept.

    Args:
        about: `updates`, `samples`, `run`, and `speeds` if there are any; see `Checkpoint`.
        files, extra: as `write_part` gives them, for all parts.
        keep: number of the newest that stay.
        keep_every: of the older ones the first after each multiple of so many updates stays.
    """
    checkpoints = partial.parent
    final = folder_of(checkpoints, about["updates"])
    with _removed_on_error(partial):
        write_json(partial / STATE, {**about, "files": files, "extra": extra})
        _sync(partial)
        partial.rename(final)
        _sync(checkpoints)
    folders = list_checkpoints(checkpoints)
    newer = folders.index(final) + 1
    older = folders[: max(0, newer - keep)]
    for folder in _unkept(older, keep_every):
        shutil.rmtree(folder, ignore_errors=True)
    # Later ones were skipped, and must not count as the newest: the run has gone on from an earlier
    # one. They are not removed, since they may be sound: perhaps one node could not read them.
    for folder in folders[newer:]:
        with suppress(OSError):  # then it stays as it is
            _set_aside(folder)


def _set_aside(folder: Path) -> None:
    """Rename a checkpoint that was skipped, so that it is none of the run's any more."""
    for number in itertools.count():
        aside = folder.with_name(f"{SKIPPED}{folder.name}" + f"-{number}" * (number > 0))
        if not os.path.lexists(aside):
            folder.rename(aside)
            return


def _unkept(older: Iterable[Path], keep_every: int | None) -> list[Path]:
    """Return the checkpoints, oldest first, but for the first after each multiple of updates."""
    if keep_every is None:
        return list(older)
    unkept: list[Path] = []
    reached = 0
    for folder in older:
        multiple = updates_after(folder) // keep_every
        if multiple == reached:
            unkept.append(folder)
        reached = multiple
    return unkept


def keep_best(checkpoints: Path, best: Path, updates: int) -> None:
    """Keep the checkpoint after so many updates as the only one in the folder `best`.

    Its files are the same as in `checkpoints`, where it will be removed, or copies of them where
    the file system has no hard links. Raises `OSError` if it cannot be kept.
    """
    target = folder_of(best, updates)
    if not target.exists():
        if not best.exists():
            make_folder(best)
        partial = partial_folder(best, updates, os.getpid())
        with _removed_on_error(partial):
            shutil.rmtree(partial, ignore_errors=True)
            make_folder(partial)
            for file in sorted(folder_of(checkpoints, updates).iterdir()):
                try:
                    os.link(file, partial / file.name)
                except OSError as error:
                    if error.errno in FULL_ERRORS:
                        raise
                    shutil.copyfile(file, partial / file.name)
                    _sync(partial / file.name)
            _sync(partial)
            partial.rename(target)
            _sync(best)
    remove_partial(best)
    for other in list_checkpoints(best):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)


@contextmanager
def _removed_on_error(partial: Path) -> Generator[None]:
    """Remove a checkpoint that cannot be written; safetensors' errors of a disk are `OSError`."""
    try:
        yield
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except SafetensorError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(errno.EIO, str(error)) from error


def make_again(checkpoints: Path) -> None:
    """Recreate the folder of a run's checkpoints if it was removed, with a warning."""
    if not is_folder(checkpoints):
        make_folder(checkpoints)
        name = checkpoints.name
        warn(f"there was no folder {name}, so no checkpoint either: it begins at update 0")


def remove_partial(checkpoints: Path) -> None:
    """Remove partial checkpoints, of attempts that were killed and groups that broke while they
    saved.

    Only the newest attempt calls it, after `Fence.publish`: an older one that still saves shall
    fail. Where a rank that was lost writes at this moment, its folder may stay; the next call
    removes it.
    """
    for path in checkpoints.glob(f"{PARTIAL}*"):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def split_reference(text: str) -> tuple[str, int | Literal["best"] | None]:
    """Return the run's folder, and which checkpoint, of `RUN`, `RUN@UPDATES` or `RUN@best`.

    >>> split_reference("runs/a"), split_reference("runs/a@4000"), split_reference("runs/a@best")
    (('runs/a', None), ('runs/a', 4000), ('runs/a', 'best'))
    """
    folder, _, updates = text.rpartition("@")
    if folder and updates == BEST:
        return folder, BEST
    if folder and re.fullmatch("[0-9]{1,18}", updates):
        return folder, int(updates)
    return text, None


def kept_checkpoint(run: RunDir, which: int | Literal["best"]) -> Path:
    """Return the folder of a run's checkpoint after so many updates, or of its best one.

    Raises:
        RunFolderError: there is none; the message names those that there are.
    """
    best = list_checkpoints(run.best)
    if which == BEST:
        if not best:
            raise RunFolderError(
                "no checkpoint is kept as its best one (train.keep_best=held_out.NAME keeps one)"
            )
        return best[-1]
    saved = list_checkpoints(run.checkpoints)
    for folder in (*saved, *best):
        if folder.name == folder_of(run.checkpoints, which).name:
            return folder
    there = [f"{run.path}@{updates_after(folder)}" for folder in saved]
    there += [f"{run.path}@{BEST}" for _ in best]
    raise RunFolderError(
        f"there is no checkpoint after update {which}; there are {', '.join(there)} "
        "(train.keep_checkpoints, train.keep_every)"
        if there
        else "that run has no checkpoint yet"
    )


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Return the folders of checkpoints, oldest first. One that lacks a file is damaged."""
    folders = [checkpoints / name for name in names_in(checkpoints) if NAME.fullmatch(name)]
    return sorted(folders, key=updates_after)


def updates_after(folder: Path) -> int:
    """Return after how many updates a checkpoint was taken."""
    return int(folder.name.removeprefix(PREFIX))


def load(folder: Path, run: str | None = None, *, contents: bool = True) -> Checkpoint:
    """Read a checkpoint's state and check every digest.

    Args:
        run: the identity of its run; None in library mode.
        contents: also read the files whose digests the state holds.

    Raises:
        RunFolderError: it is damaged, of another run, or after other updates; or it cannot be read,
            though tried for some time.
    """
    try:
        _patiently(is_folder, folder)
        state = read_json(folder / STATE, lambda path: _patiently(read_text, path))
        # Hidden files are other programs': an editor's, or NFS's of a file that is still open.
        names = _patiently(names_in, folder)
        there = {name for name in names if name != STATE and not name.startswith(".")}
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be read: {error.strerror}") from error
    if state is None:
        raise RunFolderError(f"{folder} is damaged: it has no {STATE}")
    if not all(isinstance(state.get(name), int) for name in ("updates", "samples")):
        raise RunFolderError(f"{folder} is damaged: its {STATE} has no numbers of updates, samples")
    name = NAME.fullmatch(folder.name)
    if name and int(name[1]) != state["updates"]:
        raise RunFolderError(
            f"{folder} is damaged: its {STATE} is of the checkpoint after {state['updates']} "
            "updates"
        )
    if state.get("run") != run:
        raise RunFolderError(f"{folder} is a checkpoint of another run, or its {STATE} is damaged")
    if there != state["files"].keys():
        odd = min(there ^ state["files"].keys())
        raise RunFolderError(f"{folder / odd} is damaged: {STATE} and the folder differ about it")
    checkpoint = Checkpoint(
        folder=folder,
        updates=state["updates"],
        samples=state["samples"],
        extra=state["extra"],
        files=state["files"],
        speeds=state.get("speeds", []),
    )
    if contents and (damage := checkpoint.damage(checkpoint.files)):
        raise RunFolderError(damage)
    return checkpoint


def newest(
    checkpoints: Path,
    run: str | None = None,
    *,
    contents: bool = True,
    damage: Callable[[Checkpoint], str | None] = lambda _: None,
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest valid checkpoint (None before the first), and why newer ones were skipped.

    Args:
        run, contents: see `load`.
        damage: says in the place of `contents` what is wrong with the files.

    Raises:
        RunFolderError: there are checkpoints, but none is valid: a resume does not start over
            silently.
    """
    skipped: list[str] = []
    for folder in reversed(_patiently(list_checkpoints, checkpoints)):
        try:
            checkpoint = load(folder, run, contents=contents)
        except RunFolderError as error:
            why = str(error)
        else:
            if not (why := damage(checkpoint)):
                return checkpoint, [
                    f"{why}; the next checkpoint renames this one to {SKIPPED}…; "
                    "going on from an earlier checkpoint"
                    for why in skipped
                ]
        skipped.append(why)
    if skipped:
        raise RunFolderError(
            f"no checkpoint in {checkpoints} is sound, so there is nothing to go on from: "
            f"{skipped[0]}. Bring one back from a copy, or resume once it can be read; or remove "
            "them all, and the run begins again at update 0"
        )
    return None, skipped


def read_last(
    checkpoints: Path, run: str | None, read: Callable[[Checkpoint], T], *, tries: int = READS
) -> T | None:
    """Return what `read` returns of the last checkpoint; None before the first.

    A run that trains may remove that checkpoint meanwhile: then read the one that is the last now.

    Raises:
        RunFolderError: it is damaged.
    """
    saved = list_checkpoints(checkpoints)
    if not saved:
        return None
    try:
        return read(load(saved[-1], run))
    except Exception:
        if tries == 1 or list_checkpoints(checkpoints)[-1:] == saved[-1:]:
            raise
    return read_last(checkpoints, run, read, tries=tries - 1)


def check_initial(run: RunDir) -> None:
    """Raise `RunFolderError` if the initial weights are not those that the run began with."""
    try:
        digest = _patiently(file_sha256, run.initial_weights)
    except OSError as error:
        raise RunFolderError(f"{run.initial_weights} cannot be read: {error.strerror}") from error
    if digest != run.read_submission().get(INITIAL_DIGEST):
        raise RunFolderError(f"{run.initial_weights} is damaged: its digest is another one")


def initial_state(run: RunDir) -> Checkpoint:
    """Return a run's copy of the checkpoint that it began with; its files are still to be checked.

    Raises:
        RunFolderError: it is not the one that the run began with.
    """
    begun = run.read_submission().get(BRANCH) or {}
    state = run.initial_state / STATE
    try:
        digest = _patiently(file_sha256, state)
    except OSError as error:
        raise RunFolderError(f"{state} cannot be read: {error.strerror}") from error
    if digest != begun.get("sha256"):
        raise RunFolderError(f"{state} is damaged: its digest is another one")
    return load(run.initial_state, begun.get("identity"), contents=False)


def refuse_beyond(run: RunDir, done: int, total: int | None) -> None:
    """Raise `RunFolderError` if more updates are done than the configuration asks for."""
    if total is not None and done > total:
        raise RunFolderError(
            f"{run.config} is an older one of this run: it asks for {total} updates, but the "
            f"newest checkpoint is after {done}; bring back the newest"
        )


class StaleAttempt(OrchestratorError):
    """A newer attempt of the same run has begun; this one must not write any more."""


def read_newest_attempt(path: Path) -> int:
    """Return the newest attempt that was published; -1 before the first.

    Opens the file anew: on NFS, opening asks the server for the newest content, whereas a listing
    may come from a cache.
    """
    try:
        text = read_text(path).strip()
    except FileNotFoundError:
        return -1
    if not re.fullmatch(r"[0-9]*", text):
        raise RunFolderError(f"{path} is damaged: it is not the number of an attempt")
    return int(text or -1)


class Fence:
    """One attempt's right to write."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self._attempt = path, attempt

    def publish(self) -> None:
        """Publish this attempt as the newest. Raises `StaleAttempt` if there is a newer one."""
        self.check()
        write_number(str(self._path), self._attempt)

    @property
    def is_stale(self) -> bool:
        return read_newest_attempt(self._path) > self._attempt

    def check(self) -> None:
        """Raise `StaleAttempt` once a newer attempt has begun."""
        newest = read_newest_attempt(self._path)
        if newest > self._attempt:
            raise StaleAttempt(
                f"attempt {newest} of this run has begun; this process of attempt "
                f"{self._attempt} was forgotten by the scheduler and ends without writing"
            )
