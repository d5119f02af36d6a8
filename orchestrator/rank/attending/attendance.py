"""What a rank does beside training: signs of life, and under a scheduler the fence and its way out.

On a local cluster most of it does nothing: there the launcher sees every process itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import cached_property, partial
from typing import Any

from orchestrator.config.schema import SIGNAL_AHEAD_S, Config
from orchestrator.engine.common.waiting import for_others
from orchestrator.errors import (
    EXIT_FAILED,
    ClusterError,
    Fenced,
    NoWayOn,
    PeerLost,
    RankHangs,
)
from orchestrator.lifecycle.signs.heartbeat import Heartbeat
from orchestrator.lifecycle.signs.last_word import say_last_word, wordless
from orchestrator.lifecycle.signs.node_watch import FAILED
from orchestrator.lifecycle.signs.signs_of_life import Life, link_to_supervisor
from orchestrator.lifecycle.signs.standstill import Patience
from orchestrator.lifecycle.stopping.deadline import Deadline, Notice
from orchestrator.lifecycle.stopping.departure import (
    ask_standing,
    await_verdict,
    depart,
    goes_on,
    leave_silent_node,
    leave_without,
    requeues,
    script_is_gone,
)
from orchestrator.lifecycle.stopping.stop_signals import StopFlag
from orchestrator.lifecycle.topology import Topology
from orchestrator.rank.attending.ended_by_signal import heed_signals
from orchestrator.rank.attending.fenced_recorder import Follower, Guard
from orchestrator.rank.attending.hung_neighbour import Limits, look_beside
from orchestrator.rank.attending.place_in_loop import Placed
from orchestrator.rank.attending.rank_times import RankTimes
from orchestrator.rank.failure import failure_of, write_failure
from orchestrator.rank.loop import Attended, Outcome
from orchestrator.rank.loop import Recorder as LoopRecorder
from orchestrator.rank.those_left import Left, ThoseLeft
from orchestrator.rank.writing.recorder import Recorder, Silent
from orchestrator.rank.writing.restart_note import restart_note
from orchestrator.rundir.checkpoints import Fence
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import RunDir

KILL_WAIT_S = 60.0
WAITS_UNMARKED = ("nccl", "hccl")
OTHERS_FIRST_S = 3.0  # a rank's own node knows more of it than the next node does


class Attendance:
    """One rank's. `begin` before the ranks meet, `end` however it ends."""

    def __init__(self, run: RunDir, attempt: int, topology: Topology, stop: StopFlag) -> None:
        self._run, self._attempt, self._topology, self._stop = run, attempt, topology, stop
        self._failure: dict[str, Any] | None = None
        link = link_to_supervisor()
        self.life = self._life = Life(
            run.rank_log(topology.rank), link, self._hang, self._behind,
            watched_only=topology.scheduled,
        )  # fmt: skip
        self._life.on_message(self._heed_stop)
        self._life.begin()
        self._unheard = link is None or topology.scheduled  # under SLURM its watcher dies with it
        self._fence = Fence(run.newest_attempt, attempt)
        self._heartbeat: Heartbeat | None = None
        self._requeue, self._timeout_s, self._ahead_s = True, 0.0, 0.0
        self._left = ThoseLeft(run, attempt, topology)
        # Writes, and decides what one rank has to.
        self.leads = topology.rank == 0 and not topology.replaces
        self._asking = threading.Lock()  # held while the scheduler is asked to start us again

    def _heed_stop(self, message: dict[str, Any]) -> None:
        if "stop" in message:
            self._stop.take(signal.Signals[message["stop"]])

    def begin(self, config: Config) -> None:
        """Publish this attempt, start to beat. Raises `Superseded` when a newer one has begun."""
        self._requeue = requeues(config.cluster.requeue, config.cluster.allocation)
        self._timeout_s = config.cluster.heartbeat_timeout_s
        self._ahead_s = float(config.cluster.signal_ahead_s or SIGNAL_AHEAD_S)
        topology = self._topology
        if not topology.scheduled:
            self._life.expect(Patience.of(config.cluster))
            return
        limits = Limits(self._timeout_s, config.cluster.hang_timeout_s, self._requeue)
        beside = look_beside(self._run, self._attempt, topology, limits, self._life.seen)
        self._life.expect(Patience.of(config.cluster), beside)
        if topology.rank == 0:
            self._fence.take()
        heed_signals(self._run, self._attempt, self._last_word)
        if topology.local_rank == 0:
            self._heartbeat = Heartbeat(
                partial(self._run.heartbeat, self._attempt),
                node_index=topology.node_index,
                nodes=topology.nodes,
                timeout_s=self._timeout_s + OTHERS_FIRST_S,
                on_silence=self._node_is_silent,
                superseded=self._vanish_if_superseded,
                waits=lambda: self._life.seen().waits,
            ).start()

    def _hang(self, sentence: str, stack: str) -> None:
        """From the thread of `Life`: this rank gets nowhere, and never will."""
        error = RankHangs(sentence)
        error.add_note(f"its stack:\n{stack}")
        print(f"its stack:\n{stack}\nerror: {sentence}", flush=True)
        self.failed(error)
        self._last_word(FAILED)
        os._exit(EXIT_FAILED)

    def recorder(self, inner: Recorder | Silent, outcome: Outcome, *, transport: str) -> Attended:
        """The loop's recorder for this rank: `inner`, guarded where a scheduler may interfere."""
        writes = isinstance(inner, Recorder)
        begins = outcome.done is None and not outcome.returned
        self.leads = writes
        guarded = self._guarded(inner, outcome, begins=begins)
        times = RankTimes(self._run.timeline(self._attempt) if writes else None)
        return Placed(guarded, self._life, times, waits_unmarked=transport in WAITS_UNMARKED)

    def _guarded(self, inner: Recorder | Silent, outcome: Outcome, *, begins: bool) -> LoopRecorder:
        if isinstance(inner, Recorder) and self._attempt and begins:
            note = restart_note(self._run, self._attempt, self._topology, outcome.updates)
            inner.note["restart"] = note
            write_json(self._run.restart(self._attempt), note)
        if not self._topology.scheduled:
            return inner
        if isinstance(inner, Silent):
            return Follower(self._stop, self._run.departure(self._attempt))
        cancelled = self._run.cancel.exists
        return Guard(
            inner,
            fence=self._fence,
            stop=self._stop,
            hurry=lambda: self._deadline.grace_s() if self._requeue and not cancelled() else None,
            cancelled=cancelled,
            outcome=outcome,
        )

    @cached_property
    def _deadline(self) -> Deadline:
        notice = Notice.read(self._run.read_submission(), self._ahead_s)
        return Deadline(self._stop, notice, lambda: ask_standing(self._topology.job_id))

    def allow_result(self) -> None:
        """Raises `Superseded` when result.json is another attempt's to write."""
        if self._topology.scheduled:
            self._fence.check()

    def leave(self, updates: int | None) -> bool:
        """After a stop, on rank 0: whether the run goes on later; its departure is noted then."""
        if not goes_on(self._run, self._topology, requeue=self._requeue):
            return False
        self._fence.check()
        gone = script_is_gone(self._topology)  # SLURM then ends the ranks
        why = "its batch script was killed" if gone else self._why_stopped()
        if self._left.first_node_gone:
            why += "; its first node was gone"
        depart(self._run, self._attempt, why, updates)
        if gone or self._left.first_node_gone:  # the script perhaps with it; there is little time
            self._left.hand_back()
        return True

    def _why_stopped(self) -> str:
        """By who leads, with the scheduler's word: one question a run, however many ranks leave."""
        if self.leads:
            return self._deadline.why(self._topology.restarts)
        return self._stop.words

    def why_for_good(self) -> str | None:
        """Why a stop on rank 0 ends the run, although nobody asked for its end; None if one did."""
        run, told = self._run, "{}; with cluster.requeue=false it does not start again"
        queued = self._topology.scheduled and not run.read_submission().get("held")
        return told.format(self._why_stopped()) if queued and not run.cancel.exists() else None

    def excused(self, error: BaseException) -> bool:
        """Whether an error only shows that the attempt is ending in order. Waits to find out."""
        if not isinstance(error, PeerLost) or isinstance(error, Fenced):
            return False
        if not self._topology.scheduled:
            return False
        if isinstance(error, NoWayOn):
            return self._requeue and leave_without(self._run, self._attempt, error)
        with for_others():
            return await_verdict(
                self._run, self._attempt, self._stop, self._timeout_s, survive=self._left.go_on
            )

    def restarted(self) -> None:
        """A program begins: on rank 0, why again, where this is not its first attempt."""
        if self._attempt and self._topology.rank == 0:
            note = restart_note(self._run, self._attempt, self._topology, 0)
            write_json(self._run.restart(self._attempt), note)

    def at_a_program(self) -> None:
        """The main thread waits for a program, for as long as it takes."""
        self._life.at("its program", waits=True)

    def stands_before(self, since: float | None) -> None:
        """This rank's program has not come to where the others would meet it; None: it has."""
        said = None
        if since is not None:
            at = "and has not opened the port where the ranks meet"
            where = "the start of its program"
            said = {"where": where, "since": since, "at": at, "stack": []}
        self._life.tell_behind(said)
        self._behind(said)

    def goes_on_with(self, left: Left) -> None:
        """From now on losses are survived. They hear this rank's last word before it ends: they
        would go on without it; and they miss who falls silent.
        """
        self._left.begin(left)
        if self._heartbeat is not None:
            self._heartbeat.watch_nobody()

    def at_the_end(self) -> None:
        """The loop is done; what follows is the result, and goodbye."""
        self._life.at("the end (result, goodbye to the others)")

    def failed(self, error: BaseException) -> None:
        """Record what ended this rank."""
        self._left.hear(FAILED)
        self._failure = failure_of(self._topology.rank, self._topology.node, error)
        if not isinstance(error, Fenced):  # the others go on
            write_failure(self._run, self._attempt, self._failure)

    def end(self, word: str) -> None:
        """The last word: how this rank ended. Returns once a request to start again, if one is
        under way, was heard: with this process it would be lost, and srun would wait for the silent
        node for ever.
        """
        self._left.hear(word)
        if self._heartbeat is not None:
            self._heartbeat.end()
        with self._asking:
            pass
        self._left.stand_in_for_script(timeout_s=self._timeout_s, requeue=self._requeue)
        self._last_word(word)

    def _last_word(self, word: str) -> None:
        self._life.say(word, self._failure)
        if self._unheard:
            say_last_word(self._attempt, word)

    def _node_is_silent(self, node_index: int) -> None:
        if lost := wordless(self._run, self._attempt):  # not the node: its rank is to blame
            print(f"error: rank {lost[0]} on {lost[1]} ended without a word", flush=True)
            self._last_word(FAILED)
            os._exit(EXIT_FAILED)
        with self._asking:
            try:
                leave_silent_node(
                    self._run, self._attempt, self._topology, node_index, requeue=self._requeue
                )
            except ClusterError as error:  # no scontrol in a container: the batch script may do it
                print(f"error: {error}", flush=True)
                os._exit(EXIT_FAILED)
        threading.Event().wait(KILL_WAIT_S)  # the scheduler ends us long before
        os._exit(EXIT_FAILED)

    def _behind(self, said: dict[str, Any] | None) -> None:
        """From the thread of `Life`: for who is to say whose fault it is that others fail."""
        path = self._run.behind(self._attempt, self._topology.rank)
        try:
            if said is None:
                path.unlink(missing_ok=True)
            elif self._topology.scheduled:
                own = {"rank": self._topology.rank, "node": self._topology.node}
                since = time.time() - (time.monotonic() - said["since"])
                write_json(path, {**said, **own, "since": since})
        except OSError as error:
            print(f"that could not be recorded: {error}", flush=True)

    def _vanish_if_superseded(self) -> bool:
        superseded = self._fence.is_stale
        if superseded:
            self._vanish()
        return superseded

    def _vanish(self) -> None:
        print(
            f"error: a newer attempt than {self._attempt} has begun; this one was forgotten by the "
            f"scheduler and ends",
            flush=True,
        )
        os._exit(EXIT_FAILED)
