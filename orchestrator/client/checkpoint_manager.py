"""Checkpoints of a training loop: restored on all ranks, written by rank 0, or in parts by several
ranks, perhaps by threads.

Files, digests and names are those of `rundir/checkpoints.py`; torn or damaged ones are passed over.

In parts: rank 0 makes the folder, and each rank writes its part and the part's digest. After every
boundary the ranks exchange whether they are done; once all are, rank 0 completes the checkpoint.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from orchestrator.client.loop import Callback, CompletedUpdate, TrainingProgress
from orchestrator.engine.api import CopiesState
from orchestrator.engine.common.waiting import declared
from orchestrator.errors import ConfigError, RunFolderError
from orchestrator.rundir import checkpoints as checkpoint
from orchestrator.rundir.checkpoints import Saves
from orchestrator.rundir.warnings import warn


class TrainingState(Saves, Protocol):
    """The state of a training; see `Engine`, which is one."""

    def check_replicas(self) -> None: ...
    def gather(self, numbers: Sequence[float]) -> list[list[float]]: ...
    def gather_state(self) -> None: ...
    def holds_state(self) -> bool: ...
    def part(self) -> int | None: ...
    def load_state(self, folder: Path, extra: Mapping[str, Any]) -> None: ...


class Part:
    """This rank's part of a checkpoint under way.

    Args:
        folder: that rank 0 made.
        number: see `Engine.part`.
        state: an engine, or its snapshot.
    """

    def __init__(
        self, folder: Path, number: int, state: Any, about: dict[str, Any], *, background: bool
    ) -> None:
        self.folder, self.about, self.began = folder, about, time.monotonic()
        self.extra: dict[str, Any] = {}
        self._number, self._state, self._background = number, state, background
        self._error, self._digest = 0, ""
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        if background:
            self._thread.start()
        else:
            self._write()

    def _write(self) -> None:
        with declared("it saves its part of the checkpoint after update %d", self.about["updates"]):
            self._write_part()

    def _write_part(self) -> None:
        try:
            if self._background:
                self._state.take()
            self.extra, files = checkpoint.write_part(self.folder, self._state, self._number)
            self._digest = next(iter(files.values()), "")
        except OSError as error:
            self._error = error.errno or errno.EIO
        except Exception as error:  # noqa: BLE001  # raised by the main thread
            self._failed = error

    def row(self, *, wait: bool) -> list[float]:
        """Return for all ranks: 1 once it is written, else 0; an errno; its number; its digest."""
        if wait and self._background:
            self._thread.join()
        done = not self._thread.is_alive()  # first: the thread has written its results only then
        if self._failed is not None:
            raise self._failed
        words = [self._digest[start : start + 8] or "0" for start in range(0, 64, 8)]
        return [float(done), self._error, self._number, *(float(int(w, 16)) for w in words)]


class CheckpointManager(Callback):
    """Restores and saves the state of one training on all its ranks.

    `TrainingLoop` says when: on every rank by the methods of `Saving`, and on rank 0, whose
    callback it is, by `on_checkpoint`. `rundir/checkpoints.py` says what is on the disk.

    A checkpoint that cannot be written (a full disk) causes a warning: the last good one stays, and
    the next is tried when it is due.

    Args:
        run: the run's identity; None outside any run.
        keep, keep_every: see `commit_checkpoint`.
        background: write in threads, from copies. A checkpoint that is due waits for the one
            before it: where a disk is slower than the training, the training has the disk's pace,
            as it has without a thread, and no checkpoint is left out.
        on_written: called with the number of updates.
        best: folder of the best checkpoint; see `keep_best`.

    Attributes:
        rank: of this process, in its present group.
        unsaved: why the latest checkpoint could not be written.
        speeds: of ranks, that are saved and restored; see `MeasuredSpeeds.rows`.

    Raises:
        ConfigError: the state gives no copies of itself.
    """

    def __init__(
        self,
        folder: Path,
        state: TrainingState,
        *,
        run: str | None,
        keep: int,
        keep_every: int | None = None,
        background: bool = False,
        on_written: Callable[[int], None] | None = None,
        best: Path | None = None,
    ) -> None:
        self._copier = state if background and isinstance(state, CopiesState) else None
        if background and self._copier is None:
            raise ConfigError(
                "train.checkpoint_in_background=true is not available with this engine, which "
                f"gives no copy of its state ({type(state).__name__}); leave it out"
            )
        self._folder, self._state, self._run = folder, state, run
        self._keep, self._keep_every = keep, keep_every
        self._on_written = on_written
        self._best, self._best_updates = best, 0
        self._thread: threading.Thread | None = None
        self._written: tuple[int, float, Exception | None] | None = None  # updates, seconds
        self._part: Part | None = None
        self._save_s = self._waited_s = 0.0
        self.rank = 0
        self.unsaved: str | None = None
        self.speeds: list[list[float]] = []

    def restore(self, rank: int) -> tuple[int, int] | None:
        """Load the newest valid checkpoint, the same on every rank. Collective.

        Returns:
            Its updates and samples; None without one.

        Raises:
            RunFolderError: there are checkpoints, but none can be used.
        """
        with declared("it loads a checkpoint"):
            return self._restore(rank)

    def _restore(self, rank: int) -> tuple[int, int] | None:
        self.rank, newest = rank, None
        # Rank 0 alone lists the folder, which others may see otherwise (NFS): it proposes one
        # checkpoint after the other by its updates, and each rank reads its share of the files.
        if rank == 0:
            checkpoint.make_again(self._folder)
            checkpoint.remove_partial(self._folder)
            newest, passed_over = checkpoint.newest(
                self._folder, self._run, contents=False, damage=self._damage
            )
            for sentence in passed_over:
                warn(sentence)
            self._state.gather([-1])  # the search is over, for the other ranks' loop
        else:
            while (updates := int((rows := self._state.gather([0]))[0][0])) >= 0:
                folder = checkpoint.folder_of(self._folder, updates)
                # Not raised here: this rank would leave alone, while the others wait for its
                # verdict. Rank 0 hears of it and all go on from an earlier checkpoint.
                try:
                    newest = checkpoint.load(folder, self._run, contents=False)
                    damage = self._damage_of_share(newest, len(rows))
                except RunFolderError as error:
                    damage = str(error)
                self._first_damaged(damage)
        if newest is None:
            return None
        self._state.load_state(newest.folder, newest.extra)
        self.speeds = newest.speeds
        return newest.updates, newest.samples

    def check(self, candidate: checkpoint.Checkpoint, rank: int) -> None:
        """Check a checkpoint's files, each rank a share of them. Collective.

        Raises:
            RunFolderError: one is damaged; on rank 0, and on those that read it.
        """
        self.rank = rank
        if damage := self._damage_in_share(candidate, len(self._state.gather([rank]))):
            raise RunFolderError(damage)

    def _damage(self, candidate: checkpoint.Checkpoint) -> str | None:
        """Have all ranks check a checkpoint's files; return what is wrong with them, on rank 0."""
        return self._damage_in_share(candidate, len(self._state.gather([candidate.updates])))

    def _damage_in_share(self, candidate: checkpoint.Checkpoint, ranks: int) -> str | None:
        """Check this rank's share of the files: each is read once in all. Collective.

        Returns:
            The damage; on other ranks than 0, of their own share.
        """
        own_damage = self._damage_of_share(candidate, ranks)
        odd = self._first_damaged(own_damage)
        if own_damage or odd is None or self.rank != 0:
            return own_damage
        return (
            candidate.damage(sorted(candidate.files)[odd::ranks])
            or f"{candidate.folder} is damaged, or cannot be read, as rank {odd} says"
        )

    def _damage_of_share(self, candidate: checkpoint.Checkpoint, ranks: int) -> str | None:
        return candidate.damage(sorted(candidate.files)[self.rank :: ranks])

    def _first_damaged(self, own_damage: str | None) -> int | None:
        """Return the first rank with damage in its share; None if all is well. Collective."""
        rows = self._state.gather([own_damage is not None])
        return next((rank for rank, row in enumerate(rows) if row[0]), None)

    def check_replicas(self) -> None:
        """Compare the weights of all ranks. Collective."""
        self._state.check_replicas()

    def can_save(self) -> bool:
        """Return whether rank 0 holds all of the state, so that it can save inside a window."""
        return self._state.holds_state()

    def collect(self, updates: int, samples: int) -> None:
        """Bring the state to rank 0 for `on_checkpoint`, or begin to write it in parts, once the
        checkpoint before is written. Collective.
        """
        number = self._state.part()
        if number is None:
            self._state.gather_state()
            return
        self.complete_parts(wait=True)
        folder, failed = None, None
        if self.rank == 0:
            try:
                with declared("it begins the checkpoint after update %d", updates):
                    folder = checkpoint.begin(self._folder, updates, self._run)
            except OSError as error:
                failed = error
        # By its pid all know the folder, or that rank 0 could not make it.
        [writer] = self._state.gather([os.getpid() if folder is not None else -1])[:1]
        if failed is not None:
            self._written = updates, 0.0, failed
            self._report_written()
        if writer[0] < 0:
            return
        folder = checkpoint.partial_folder(self._folder, updates, int(writer[0]))
        state = self._copier.snapshot() if self._copier else self._state
        about = {"updates": updates, "samples": samples, "run": self._run}
        self._part = Part(folder, number, state, about, background=self._copier is not None)

    def complete_parts(self, *, wait: bool) -> None:
        """Complete the checkpoint whose parts are being written, once all are. Collective."""
        if (part := self._part) is None:
            return
        rows = self._state.gather(part.row(wait=wait))
        if not all(row[0] for row in rows):
            return
        self._part = None
        if self.rank != 0:
            return
        errors = [OSError(int(error), os.strerror(int(error))) for _, error, *_ in rows if error]
        failed = errors[0] if errors else None
        files = {
            checkpoint.part_name(int(number)): "".join(f"{int(word):08x}" for word in words)
            for _, _, number, *words in rows
            if number >= 0
        }
        if failed is None:
            updates = part.about["updates"]
            try:
                with declared("it completes the checkpoint after update %d", updates):
                    checkpoint.commit_checkpoint(
                        part.folder,
                        part.about,
                        files,
                        part.extra,
                        keep=self._keep,
                        keep_every=self._keep_every,
                    )
            except OSError as error:
                failed = error
        checkpoint.remove_partial(self._folder)  # of this one, or of one that was dropped
        self._written = part.about["updates"], time.monotonic() - part.began, failed
        self._report_written()

    def drop_parts(self) -> None:
        """Forget a checkpoint that is being written in parts, since its group broke."""
        self._part = None

    def keep_best(self, updates: int) -> None:
        """Keep the checkpoint after so many updates as the best one, once it is written."""
        self._best_updates = updates
        if self.has(updates):
            self._keep_best()

    def _keep_best(self) -> None:
        assert self._best is not None  # noqa: S101  # a trainer with train.keep_best names it
        try:
            checkpoint.keep_best(self._folder, self._best, self._best_updates)
        except OSError as error:
            warn(
                f"the best checkpoint, after update {self._best_updates}, could not be kept: "
                f"{error.strerror or error}",
                kind="checkpoint not written",
            )

    def has(self, updates: int) -> bool:
        """Return whether there is a checkpoint after so many updates."""
        return checkpoint.folder_of(self._folder, updates).exists()

    @property
    def save_s(self) -> float:
        """Seconds until a checkpoint that is due now is written, estimated from the last one."""
        running = self._thread is not None and self._thread.is_alive()
        return max(self._waited_s, self._save_s * (1 + running))

    def on_boundary(self, done: CompletedUpdate) -> None:
        del done
        self._report_written()

    def on_checkpoint(self, updates: int, samples: int) -> None:
        if self._state.part() is not None:
            return  # `collect`, which all ranks have just called, has begun to write the parts
        began = time.monotonic()
        self.wait()
        about = updates, samples, [list(row) for row in self.speeds]
        if self._copier:
            copy = self._copier.snapshot()
            self._thread = threading.Thread(
                target=self._write, args=(copy, *about), name="checkpoint", daemon=True
            )
            self._thread.start()
        else:
            self._write(self._state, *about)
            self._report_written()
        self._waited_s = time.monotonic() - began

    def save_now(self, progress: TrainingProgress) -> None:
        """Save what rank 0 holds after the last update, and wait until it is written."""
        self.on_checkpoint(progress.updates, progress.samples)
        self.wait()

    def _write(
        self, state: Any, updates: int, samples: int, speeds: Sequence[Sequence[float]]
    ) -> None:
        with declared("it saves the checkpoint after update %d", updates):
            self._write_whole(state, updates, samples, speeds)

    def _write_whole(
        self, state: Any, updates: int, samples: int, speeds: Sequence[Sequence[float]]
    ) -> None:
        began, failed = time.monotonic(), None
        try:
            if self._copier:
                state.take()
            checkpoint.save(
                self._folder,
                state,
                updates=updates,
                samples=samples,
                keep=self._keep,
                keep_every=self._keep_every,
                run=self._run,
                speeds=speeds,
            )
        except Exception as error:  # noqa: BLE001  # raised, or warned of, by the main thread
            failed = error
        self._written = updates, time.monotonic() - began, failed

    def wait(self) -> None:
        """Return once no checkpoint is being written any more."""
        if self._thread is not None:
            self._thread.join()
        self._report_written()

    def _report_written(self) -> None:
        """Report how the latest checkpoint ended, once, unless it is still being written."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = None
        written, self._written = self._written, None
        if written is None:
            return
        updates, self._save_s, error = written
        name = f"the checkpoint after update {updates}"
        if error is None:
            if self.unsaved is not None:
                warn(f"there is room again: {name} was written")
            self.unsaved = None
            if updates == self._best_updates:
                self._keep_best()
            if self._on_written is not None:
                self._on_written(updates)
            return
        if not isinstance(error, OSError):
            raise error
        self.unsaved = f"{name} could not be written: {error.strerror or error}"
        fallback = ", the last good checkpoint is kept" * any(self._folder.glob("update-*"))
        warn(f"{self.unsaved}; the run goes on{fallback}", kind="checkpoint not written")
