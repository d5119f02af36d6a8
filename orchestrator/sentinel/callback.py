"""The callback that has ranks compute each other's leaves again, right before a boundary.

In an update that is due, each rank computes one leaf of another rank, so that all are checked in
the time of one leaf. Their digests travel in one small gather. If two differ, all ranks compute
that leaf once more, and most of them are right. Weights are still those before the update.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from orchestrator.agent.topology import Topology
from orchestrator.callbacks import Callback
from orchestrator.client.loop import RankWindows, Trained
from orchestrator.client.run import current_run
from orchestrator.config.reading import read_config
from orchestrator.engine.api import MicroBatch, RecomputesLeaves
from orchestrator.errors import ConfigError, Excluded, JobError, RunFolderError, WrongResult
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import COMPUTED_WRONGLY
from orchestrator.rundir.warnings import warn
from orchestrator.sentinel.judgement import (
    LIMBS,
    chosen_leaf,
    differing_owners,
    from_limbs,
    is_due,
    shift_of,
    to_limbs,
    wrong_ranks,
)
from orchestrator.units import first_few

KEY = "accumulation.sentinel_every"
NAME_BYTES = 64
"""Of a node's name, for messages."""


class Sentinel(Callback):
    """Check leaves of all ranks in every so many updates."""

    _engine: RecomputesLeaves
    _windows: RankWindows
    _is_new = True  # this process has checked nothing yet
    _may_refuse = False

    def on_start(self, trained: Trained) -> None:
        self._run = RunDir(current_run.folder)
        config = read_config(self._run.read_config())
        accumulation = config.accumulation
        if trained.engine is None or trained.windows is None or accumulation.sentinel_every is None:
            raise ConfigError(
                f"{KEY}={accumulation.sentinel_every} needs a job class of torch, whose engine "
                "computes leaves again; leave it out"
            )
        self._every = accumulation.sentinel_every
        self._refuse_job(trained.job)
        self._effect, self._seed = accumulation.sentinel, config.train.seed
        self._in_queue = config.cluster.kind == "slurm"
        self._engine, self._windows = trained.engine, trained.windows
        self._rank, self._ranks = current_run.rank, current_run.ranks or 1
        self._is_first = True  # no window of this group was checked
        self._own: int | None = None  # the digest of this rank's chosen leaf
        if self._ranks == 1:
            warn(f"{KEY}={self._every} checks nothing while there is one rank")

    def _refuse_job(self, job: Any) -> None:
        if getattr(job, "talks_in_window", False):
            raise JobError(
                f"{KEY}={self._every} is not available with talks_in_window = True: "
                f"{type(job).__name__}.loss() calls collectives, so no rank can compute a "
                "micro-step alone; leave it out"
            )

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        # The first window shows at once whether the job's leaves can be computed again.
        if self._ranks == 1 or not (self._is_first or is_due(update, self._every)):
            return
        if done == 0:
            self._own = None
        leaves = self._windows.window(update).micro_batches
        place = chosen_leaf(self._seed, update, self._rank, len(leaves))
        # A rank with fewer micro-steps than others comes to the boundary right after its last.
        if self._own is None and place is not None and min(done, len(leaves)) == place + 1:
            self._own = self._engine.leaf_digest()
        if done == steps:
            self._check(update)
            self._own, self._is_first, self._is_new = None, False, False
            self._may_refuse = False

    # ------------------------------------------------------------------ a check

    def _check(self, update: int) -> None:
        """Have each rank compute a leaf of another one; name those that err. Collective.

        Raises:
            JobError: leaves of this job cannot be computed again.
            WrongResult: a rank erred, and the run is to stop then.
            Excluded: this rank erred, and the others are to continue without it.
        """
        shift = shift_of(update, self._every, self._ranks)
        if self._is_first:
            self._learn_ranks()
        checked = self._recompute(update, (self._rank - shift) % self._ranks)
        own = self._own or 0
        digests = [own, checked]
        if self._is_first:
            digests.append(self._recompute(update, self._rank))
        rows = self._exchange(digests)
        owns, others = [row[0] for row in rows], [row[1] for row in rows]
        if self._is_first:
            self._refuse_unsteady(update, owns, [row[2] for row in rows])
        differing = differing_owners(owns, others, shift)
        if not differing:
            return
        # One leaf is enough: those that differ all involve a rank that always errs.
        owner = differing[0]
        checker = (owner + shift) % self._ranks
        repeats = [row[0] for row in self._exchange([self._recompute(update, owner)])]
        wrong = wrong_ranks(owner, owns[owner], checker, others[checker], repeats)
        leaf = self._leaf(update, owner)
        assert leaf is not None  # noqa: S101  # its digests would be equal
        if wrong:
            self._report(wrong, update, f"micro-step {leaf.number}", decided=True)
        else:
            self._report([owner, checker], update, f"micro-step {leaf.number}", decided=False)

    def _leaf(self, update: int, rank: int) -> MicroBatch | None:
        """Return the leaf of a rank that is computed again in this update."""
        if rank == self._rank:
            leaves = self._windows.window(update).micro_batches
        else:
            leaves = self._windows.of_rank(update, rank).micro_batches
        place = chosen_leaf(self._seed, update, rank, len(leaves))
        return None if place is None else leaves[place]

    def _recompute(self, update: int, rank: int) -> int:
        """Return the digest of a rank's chosen leaf, computed here; 0 where it has none."""
        leaf = self._leaf(update, rank)
        if leaf is None:
            return 0
        recomputed = self._engine.recompute_leaf(leaf)
        if recomputed.changed:
            sentence = (
                f"loss() changes {first_few(list(recomputed.changed), 3)}, which cannot be "
                f"restored after a second computation ({KEY}={self._every}): define state_dict() "
                "and load_state_dict() in the job"
            )
            if self._may_refuse:
                raise JobError(f"{sentence}, or leave {KEY} out")
            warn(sentence, kind="sentinel changes")
        return recomputed.digest

    def _exchange(self, digests: list[int]) -> list[list[int]]:
        """Return all ranks' digests. Collective."""
        rows = self._engine.exchange([limb for digest in digests for limb in to_limbs(digest)])
        starts = range(0, LIMBS * len(digests), LIMBS)
        return [[from_limbs(row[start : start + LIMBS]) for start in starts] for row in rows]

    def _learn_ranks(self) -> None:
        """Learn of all ranks their numbers in the attempt and their nodes' names. Collective."""
        topology = Topology.from_env(os.environ)
        name = topology.node.encode()[:NAME_BYTES].ljust(NAME_BYTES)
        rows = self._engine.exchange([topology.rank, self._is_new, *map(float, name)])
        self._numbers = [int(row[0]) for row in rows]
        self._nodes = [bytes(map(int, row[2:])).decode(errors="replace").strip() for row in rows]
        # A job is refused at the start of a run; after days no run ends for it.
        self._may_refuse = all(row[1] for row in rows)

    def _refuse_unsteady(self, update: int, own: list[int], again: list[int]) -> None:
        """Refuse a job whose leaves differ when the same rank computes them twice.

        Raises:
            JobError: on all ranks alike. If some ranks alone differ, the job is not to blame.
            WrongResult, Excluded: as in `_check`.
        """
        unsteady = [rank for rank, digest in enumerate(own) if digest != again[rank]]
        if not unsteady:
            return
        if self._may_refuse and len(unsteady) == sum(digest != 0 for digest in own):
            raise JobError(
                f"{KEY}={self._every}: a micro-step that the same rank computes twice has other "
                "bits the second time. loss() draws random numbers from generators of its own, or "
                "depends on values that it changes itself (spectral norm, say); draw from the "
                f"global generators, which are seeded, or leave {KEY} out"
            )
        self._report(unsteady, update, "a micro-step computed twice", decided=True)

    # ------------------------------------------------------------------ the result

    def _report(self, ranks: list[int], update: int, what: str, *, decided: bool) -> None:
        """Warn of ranks, and have `notify` send it; or stop all. All ranks call it alike.

        Args:
            what: was computed.
            decided: they are wrong; else one of them is.

        Raises:
            WrongResult: by `accumulation.sentinel=stop`.
            Excluded: on a wrong rank, by `accumulation.sentinel=exclude`.
        """
        numbers = [self._numbers[rank] for rank in ranks]
        who = " and ".join(f"rank {self._numbers[rank]} on {self._nodes[rank]}" for rank in ranks)
        if decided:
            nodes = ",".join(dict.fromkeys(self._nodes[rank] for rank in ranks))
            sentence = (
                f"{who} {COMPUTED_WRONGLY} {update}: the bits of {what} are not those that "
                "most computations give"
            )
            if self._in_queue:
                sentence += f"; to train without that node: cluster.exclude={nodes}"
        else:
            more = ", as it takes 3 ranks" if self._ranks == 2 else ""
            sentence = (
                f"{who} differ in update {update}: each gives the same bits of {what} again, so "
                f"which is wrong is undecided{more}. Unlike processors or libraries, and a loss "
                "that depends on the rank, have the same effect"
            )
        if self._rank == 0:
            about = {"time": time.time(), "ranks": numbers, "text": sentence}
            with contextlib.suppress(OSError, RunFolderError):  # a full disk ends no training
                write_json(self._run.wrong_result(current_run.attempt), about)
        if self._effect == "stop":
            raise WrongResult(f"{sentence}. The update was not made", numbers)
        if self._rank == 0:
            warn(sentence, kind=f"sentinel {numbers}")
        if self._effect == "exclude" and decided and self._rank in ranks:
            raise Excluded("it computed wrongly (accumulation.sentinel=exclude)")
