"""Training after a loss: a worker's part in the next generation of ranks, and its messages."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.agent.node_spec import SILENCE_S
from orchestrator.client.loop import Callback, CompletedUpdate, TrainingProgress
from orchestrator.config.schema import ClusterConfig, node_range
from orchestrator.engine.api import BoundaryReport, Engine, Framework, GroupSpec, Survives, Window
from orchestrator.engine.common import waiting
from orchestrator.engine.common.waiting import for_others
from orchestrator.errors import (
    ConfigError,
    Evicted,
    PeerLost,
    RendezvousError,
    StateLost,
    StopRequested,
    Unrecoverable,
)
from orchestrator.rundir.checkpoints import file_sha256
from orchestrator.rundir.generations import GenerationRecord, member_of, members_of, rank_of
from orchestrator.rundir.warnings import warn
from orchestrator.source.modules import folder_of, loaded_files
from orchestrator.trainer.worker import WorkerProcess
from orchestrator.units import named_ranks

log = logging.getLogger(__name__)


def describe_loss(
    gone: Sequence[int], update: int, why: Sequence[str], *, over: bool, evaluating: bool = False
) -> str:
    """Return which ranks were lost, when, and why.

    >>> describe_loss([3], 12, ["on node1: killed by signal 9 (SIGKILL)"], over=False)
    'rank 3 went away in update 12, on node1: killed by signal 9 (SIGKILL)'
    >>> describe_loss([0, 1], 41, [], over=True)
    'ranks 0-1 went away after the last update, 40'
    >>> describe_loss([3], 12, [], over=False, evaluating=True)
    'rank 3 went away in the evaluation after update 11'
    """
    when = f"after the last update, {update - 1}" if over else f"in update {update}"
    if evaluating:
        when = f"in the evaluation after update {update - 1}"
    return ", ".join([f"{named_ranks(gone)} went away {when}", *why])


# ----------------------------------------------------------------------
# Digests of a job's own modules: a replacement imports them later than the others did, and must
# compute what they compute.


def modules_of(job: Any) -> dict[str, str]:
    """Return digests of all modules imported from the folder of this job's class, by name."""
    files = loaded_files(folder_of(type(job)))
    return {name: file_sha256(path) for name, path in files.items()}


# ----------------------------------------------------------------------
# A worker's part in training after losses, and with replacements.

MARGIN_S = 3.0
"""From a loss until its generation is here, besides the time until the loss is noticed."""
POLL_S = 0.2
NEXT_GROUP = "the next group to form"
MOST_TRIES = 3
"""Losses in one update that are survived; one more is probably caused by the update itself."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Members that train together. `noticed`: monotonic time at which this worker received it."""

    number: int
    members: tuple[int, ...]
    noticed: float


class GroupMembership(Callback):
    """One worker's part in training without lost ranks. `begin` or `join` comes first.

    The coordinator decides the generations. The link's threads receive them, and interrupt the main
    thread, which may wait for a lost rank.

    Args:
        spec: of the attempt's first group, also on a replacement.
        go_back: see `Training.go_back`.

    Attributes:
        rank, size: this worker's rank in the present group, and the group's size.
        changes: a line for metrics.jsonl about each change of the group, with `survived` (lost
            ranks) and `joined` (replacements).

    Raises:
        ConfigError: the framework's engine cannot continue in another group.
    """

    def __init__(
        self,
        spec: GroupSpec,
        cluster: ClusterConfig,
        framework: Framework,
        engine: Engine,
        worker: WorkerProcess,
        *,
        updates: int,
        go_back: Callable[[int], int | None],
    ) -> None:
        if not isinstance(engine, Survives):
            raise ConfigError(
                f"run.survive=true is not available with the engine of {type(framework).__name__}, "
                "which cannot go on in another group; leave it out, and use run.max_restarts"
            )
        self._spec, self._framework, self._updates = spec, framework, updates
        self._go_back = go_back
        self._engine = engine
        self._me = member_of(spec.rank, worker.topology.incarnation, spec.size)
        nodes = worker.topology.nodes
        self._ranks_per_node, self._all_nodes = spec.size // nodes, set(range(nodes))
        self._least_nodes = 1 if isinstance(cluster.nodes, int) else node_range(cluster.nodes)[0]
        self._silence_s = min(cluster.heartbeat_timeout_s, SILENCE_S)
        self._record = GenerationRecord(spec.folder)
        self._changed = threading.Condition()  # of the next five, which messages set
        self._latest = Generation(-1, (), time.monotonic())
        self._why: list[str] = []  # reasons for losses since the last change of the group
        self._left = False  # no generation follows
        self._delayed = 0.0  # when the next one was last said to wait for space on the disk
        self._newcomers_wait = False
        self._group: Any = None
        self._interrupt: Callable[[], None] = lambda: None
        self._generation = self._reported = 0
        self._members = tuple(range(spec.size))
        self.changes: list[dict[str, Any]] = []
        self._tries = (-1, 0)
        self.rank, self.size = spec.rank, spec.size
        self._link = worker.link
        self._link.on_message, self._link.on_beat = self._receive, self._report_if_stuck

    # ------------------------------------------------------------------ the link's threads

    def _receive(self, message: Mapping[str, Any]) -> None:
        # Without the lock, since no other thread writes `_latest`.
        newer = message.get("generation", -1) > self._latest.number
        with self._changed:
            if newer:
                members = tuple(members_of(message))
                self._latest = Generation(message["generation"], members, time.monotonic())
                self._why += message["why"]
                self._newcomers_wait = False
            self._left = self._left or message.get("left", False)
            if message.get("delayed"):
                self._delayed = time.monotonic()
            self._newcomers_wait = message.get("newcomers", self._newcomers_wait)
            self._changed.notify_all()
        if newer and self._latest.number > 0:  # 0 is the beginning, which breaks nothing off
            self._interrupt()

    def interrupt(self) -> None:
        """Interrupt the main thread's wait in the present group, from any thread."""
        self._interrupt()

    def _report_if_stuck(self) -> None:
        """Report to the agents if the main thread does not return from an interrupted collective.

        gloo can lose a send whose connection breaks as it begins, and the others would wait. The
        only remaining worker holds the run's only state, so it waits on.
        """
        wait, latest = waiting.under_way() if waiting.waits() else None, self._latest
        # A generation that the main thread has joined, or that was reported, is no reason.
        if wait is None or latest.number <= max(self._generation, self._reported):
            return
        since, awaited = wait
        interrupted_s = time.monotonic() - latest.noticed
        if not awaited or since > latest.noticed or interrupted_s <= self._silence_s:
            return
        self._reported = latest.number
        cause = (
            f"it did not come back from {awaited}, which was broken off {self._silence_s:g} s ago"
        )
        if len(latest.members) == 1:
            warn(f"{cause}; no other rank is left, so it waits on", about="rank")
        else:
            self._link.send_event("stuck", cause=cause)

    def close(self) -> None:
        """Close the present group in order, as every member does at the end. Collective."""
        self._group.close()

    # ------------------------------------------------------------------ the loop

    def begin(self, job: Any, group: Any) -> None:
        """Take part from the attempt's beginning, once the engine is built. Collective."""
        self._group = group
        self._interrupt = group.interrupt  # before a loss can be one that others survive
        self._link.send_event("begins", code=modules_of(job))
        with for_others("the others to begin"), self._changed:
            self._changed.wait_for(lambda: self._latest.number >= 0)

    def join(self, job: Any, progress: TrainingProgress, stopped: Callable[[], bool]) -> None:
        """Replace a lost rank: ask, wait until a boundary lets this worker in, and bring `progress`
        to where the others are.

        Raises:
            Evicted: the others' code differs from this worker's, or the run ends, or is asked to
                stop, before this worker is let in.
        """
        # From the record itself, since messages about generations leave the digests out.
        first = self._record.read(0)
        assert first is not None  # noqa: S101  # written before the first rank can be replaced
        then, now = first["code"], modules_of(job)
        if odd := sorted(name for name in then.keys() & now.keys() if then[name] != now[name]):
            raise Evicted(f"{', '.join(odd)} changed on disk since the others began")
        log.info("this rank asks to join the others")
        self._link.send_event("joins")
        with for_others("the others to let it in"), self._changed:
            while self._me not in self._latest.members:
                self._reported = self._latest.number  # it breaks off nothing here
                if self._left:
                    raise Evicted("the run ended before this rank could join")
                if stopped():
                    raise Evicted("the run is to stop, and this rank was not let in yet")
                self._changed.wait(POLL_S)
            newer = self._latest
        self._why.clear()  # those were losses of the others
        # As if it had trained with the others until now: `newer` is then a change like any other.
        self._members = tuple(member for member in newer.members if member != self._me)
        self._generation = newer.number - 1
        self.continue_training(PeerLost("this rank takes its place again"), progress)

    def on_micro_step(self, update: int, done: int, steps: int) -> None:
        """Leave the window when there is a newer generation; before the boundary, which informs
        all ranks, report whether newcomers wait.
        """
        del update
        # The ranks of a copy in shards have to leave at the same place: each micro-step is theirs.
        leaves = done == steps or not self._engine.shard_ranks
        if leaves and self._latest.number > self._generation:
            raise PeerLost("another rank is gone")
        if done == steps:
            self._engine.newcomers_wait(self._newcomers_wait)

    def on_held_out_piece(self, done: int) -> None:
        """Leave the evaluation when there is a newer generation, which does it again."""
        del done
        # The pieces of a copy in shards are collective among its ranks.
        if not self._engine.shard_ranks and self._latest.number > self._generation:
            raise PeerLost("another rank is gone")

    def before_record(self) -> None:
        """On the rank that writes: raise `PeerLost` by the record itself, since the thread that
        hears of generations may have been stopped together with this rank.
        """
        if self.rank != 0 or (newer := self._record.read(self._generation + 1)) is None:
            return
        if not self._engine.shard_ranks or self._me not in newer["members"]:
            raise PeerLost("another rank is gone")

    # ------------------------------------------------------------------ the next generation

    def grow(self, progress: TrainingProgress) -> None:
        """Continue with newcomers, after a boundary that announced them to all ranks. Collective;
        raises as `continue_training`.
        """
        self._engine.before_growth()
        self._link.send_event("ready", generation=self._generation, updates=progress.updates)
        with for_others("newcomers to be let in"):
            self._await_newer(self._spec.collective_timeout_s)
        self.continue_training(PeerLost("newcomers are let in"), progress)

    def continue_training(self, error: PeerLost, progress: TrainingProgress) -> None:
        """Form the next group with the ranks that are left, and bring `progress` to where the most
        advanced of them is. Collective among these.

        Args:
            error: how this rank noticed the loss.

        Raises:
            Evicted: the others continue without this rank.
            Unrecoverable: too many losses came in one update, or a part of the state is lost.
            PeerLost: no rank is known to be lost.
        """
        log.info("%s", error)
        noticed = 0.0
        while True:
            with for_others(NEXT_GROUP):
                newer = self._await_newer(self._silence_s + MARGIN_S)
                if newer.number <= self._generation:
                    raise error
            self._generation = newer.number
            if self._me not in newer.members:
                raise Evicted(
                    f"rank {self._spec.rank} was silent for {self._silence_s:g} s, and the "
                    f"others have continued without it (generation {newer.number})"
                ) from error
            noticed = noticed or newer.noticed  # of the first, if more losses follow
            try:
                lost = self._join(newer, progress)
            except Unrecoverable:  # a PeerLost, too, but a further try does not help
                raise
            except (PeerLost, RendezvousError, StopRequested) as again:
                error = again if isinstance(again, PeerLost) else PeerLost(str(again))
                log.info("%s", error)
            else:
                self._note_change(newer, progress, time.monotonic() - noticed, lost)
                return

    def _await_newer(self, timeout_s: float) -> Generation:
        """Wait for the next generation; return the latest at the timeout, or if none will come. The
        timeout counts from when it was last said to be delayed.
        """
        # The coordinator may be blocked in writing the generation, and cannot say so then.
        timeout_s = max(timeout_s, 3 * self._silence_s, self._spec.timeout_s)
        began = time.monotonic()
        with self._changed:
            while self._latest.number <= self._generation and not self._left:
                left_s = max(began, self._delayed) + timeout_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return self._latest

    def _join(self, newer: Generation, progress: TrainingProgress) -> int | None:
        """Join the group. Return how many updates a lost part of the state took back."""

        def given_up() -> bool:
            return self._latest.number > newer.number or self._link.run_failed

        rank, size = newer.members.index(self._me), len(newer.members)
        spec = replace(
            self._spec, rank=rank, size=size, generation=newer.number, stop_requested=given_up
        )
        with for_others(NEXT_GROUP):
            group = self._form(spec)
        self._group = group
        self._interrupt = group.interrupt
        if given_up():  # before there was a group to interrupt
            raise PeerLost("one more rank is gone")
        self.rank, self.size = rank, size
        own_update = None
        if (done := progress.done) is not None:
            own_update = {  # as text for every rank that is behind, so without indices and losses
                "window": asdict(replace(done.window, micro_batches=(), order=None)),
                "report": asdict(replace(done.report, losses=())),
                "seconds": done.seconds,
                "samples": progress.samples,
            }
        try:
            # The state of the others is a transfer, and no wait that a limit may end.
            with waiting.declared("it brings the next group to one state"):
                other_update = self._engine.catch_up(
                    group, progress.updates, json.dumps(own_update)
                )
        except StateLost as lost:
            self._engine.regroup(group)  # loading a checkpoint is collective in the new group
            if (taken_back := self._go_back(rank)) is None:
                raise self._unrecoverable(f"{lost}, and there is no checkpoint yet") from lost
            return taken_back
        if other_update is not None:  # another rank has done one more update than this one
            record: dict[str, Any] = json.loads(other_update)
            window = Window(**record["window"] | {"micro_batches": ()})
            report = BoundaryReport(**record["report"])
            progress.add(CompletedUpdate(window, report, record["seconds"]))
            progress.samples = record["samples"]
        self._engine.regroup(group)
        return None

    def _form(self, spec: GroupSpec) -> Any:
        """Return a group, formed in a thread that stays behind if one more member dies: it would
        wait for that member for ever.

        Raises:
            PeerLost: `spec.stop_requested()` meanwhile.
        """
        results: list[Any] = []

        def form() -> None:
            try:
                results.append(self._framework.form_group(spec))
            except Exception as error:  # noqa: BLE001  # raised again below
                results.append(error)

        thread = threading.Thread(target=form, name="forming", daemon=True)
        thread.start()
        while not results:
            thread.join(0.005)  # short: all ranks wait for the last one that forms the group
            if not results and spec.stop_requested():
                raise PeerLost("one more rank is gone")
        if isinstance(results[0], Exception):
            raise results[0]
        return results[0]

    def _note_change(
        self, newer: Generation, progress: TrainingProgress, seconds: float, lost: int | None
    ) -> None:
        """Note the change of the group; raise `Unrecoverable` after too many in one update."""
        old, new = set(self._members), set(newer.members)
        self._members = newer.members
        gone, came = (
            sorted(rank_of(member, self._spec.size) for member in members)
            for members in (old - new, new - old)
        )
        with self._changed:
            why, self._why = self._why, []
        update, count = progress.updates + 1 + (lost or 0), len(newer.members)
        facts = {
            "generation": newer.number,
            "ranks": count,
            "nodes": len(self._nodes),
            "seconds": round(seconds, 3),
        }
        # Where no update was under way, none is redone.
        evaluating = lost is None and progress.evaluating
        over = lost is None and progress.over(self._updates)
        change: dict[str, Any] = {"generation": newer.number}
        if came:
            change["joined"] = {**facts, "came": came}
            self._say(f"{named_ranks(came)} rejoined; {count} ranks go on with update {update}")
        if gone:
            back = {} if lost is None else {"lost_updates": lost}
            ended = {"redone": 0} if over or evaluating else {}
            change["survived"] = {**facts, "gone": gone, "why": why, **back, **ended}
            # Losses count from 1 again once an update is done.
            tries = 1 + self._tries[1] * (self._tries[0] == progress.updates)
            self._tries = (progress.updates, tries)
            if tries > MOST_TRIES:
                raise self._unrecoverable(
                    f"{tries} groups began update {progress.updates + 1}, and each lost ranks in "
                    f"it, at last {named_ranks(gone)}: so many losses in one update are not "
                    f"survived"
                )
            sentence = describe_loss(gone, update, why, over=over, evaluating=evaluating)
            if lost is not None:
                sentence += (
                    "; no rank has its part of the optimizer's state, so the run goes back to its "
                    f"newest checkpoint, after update {progress.updates}"
                )
            rest = f"{count} ranks redo it and go on" if count > 1 else "1 rank redoes it, alone"
            if evaluating:
                rest = f"{count} ranks evaluate again" if count > 1 else "1 rank evaluates again"
            elif over:
                rest = f"{count} ranks end the run" if count > 1 else "1 rank ends the run"
            self._say(f"{sentence}; {self._node_shortage() or rest}")
        self.changes.append(change)
        log.info("generation %d after %.2f s", newer.number, seconds)

    def _say(self, sentence: str) -> None:
        """Print a sentence to this rank's log; on the first rank, also warn."""
        if self._members[0] == self._me:
            warn(sentence)
        log.info("%s", sentence)

    @property
    def _nodes(self) -> set[int]:
        return {
            rank_of(member, self._spec.size) // self._ranks_per_node for member in self._members
        }

    def _unrecoverable(self, why: str) -> Unrecoverable:
        return Unrecoverable(why, sorted(self._all_nodes - self._nodes))

    def too_few(self) -> Unrecoverable | None:
        """Return why the ranks that are left must not continue; None where they may."""
        refusal = self._node_shortage()
        return self._unrecoverable(refusal) if refusal else None

    def _node_shortage(self) -> str:
        """Return a sentence if too few nodes are left for the run; else ""."""
        count, least = len(self._nodes), self._least_nodes
        if count >= least:
            return ""
        nodes = "1 node is" if count == 1 else f"{count} nodes are"
        return f"{nodes} left, fewer than cluster.nodes.min={least}, so the run does not go on"
