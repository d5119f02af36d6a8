"""The coordinator: decides for all agents; receives events and sends commands.

It receives every start and end of a worker and of an agent, and decides the members of the next
generation, which workers are replaced, and how the attempt ended. State that must outlive it is in
the attempt's folder: the record of generations, the ends of nodes whose workers have finished
before the others, and finally `outcome.json`. Everything else arrives with each agent's first
message, so any agent can take over.

| an attempt | until | meanwhile `tick` decides on |
|---|---|---|
| forms | all workers are ready to train | its first generation |
| trains | a worker ends in order or fails, or no member lives | losses, replacements, newcomers |
| is over (`_over`) | all workers have ended | its outcome |
| fails: it is over, and others remain | their time is up (`_election.until`) | who saves |
| is killed (`_killed`) | all workers have ended, or sleep in the kernel | its outcome |

Parts with a state of their own find what is due, and know nothing of the coordinator: the agents
(`agent_registry.py`), members (`membership.py`), replacements of lost ranks (`replacements.py`),
ranks that make no progress (`standstills.py`), the last save (`saver_election.py`), and causes of
the end (`causes.py`).
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

from orchestrator.agent.agent_registry import AGENT_GONE, AgentRegistry
from orchestrator.agent.causes import (
    Causes,
    Stalled,
    await_stack,
    describe_hang,
    hanging_culprit,
)
from orchestrator.agent.links import Port
from orchestrator.agent.liveness import BEAT_S, EVICTED, FINISHED, STOPPED
from orchestrator.agent.membership import Membership
from orchestrator.agent.node_spec import NodeSpec, recorded_ends
from orchestrator.agent.replacements import Replacements
from orchestrator.agent.root_cause import (
    EXTERNAL_KILL_SIGNALS,
    AbnormalEnd,
    stopped_cause,
    tail,
)
from orchestrator.agent.saver_election import SaverElection
from orchestrator.agent.stacks import STACK_S
from orchestrator.agent.standstills import Standstills, reset_waits
from orchestrator.agent.worker_state import WorkerState
from orchestrator.errors import RunFolderError
from orchestrator.rundir.files import is_folder, write_json
from orchestrator.rundir.folder import MISSING_FOLDER_CHECKS, RunDir
from orchestrator.rundir.generations import (
    GenerationRecord,
    incarnation_of,
    rank_of,
)
from orchestrator.rundir.outcome import Culprit
from orchestrator.rundir.warnings import About, warn_of

log = logging.getLogger(__name__)

KILL_S = 5.0
"""Time from SIGKILL to a process's end; one that sleeps in the kernel ends only when it wakes."""
LOSS_WAIT_S = 0.05
"""Time to wait for further losses: workers that die together should cost one generation."""


class Coordinator:
    """Coordinator of one attempt. `lost`: nodes whose agents were lost when this one takes over."""

    def __init__(
        self,
        spec: NodeSpec,
        lost: Collection[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._spec, self._run = spec, RunDir(spec.run)
        self._ranks = spec.ranks
        self._record = GenerationRecord(self._run.attempt(spec.attempt))
        self._beat_at = self._clock()
        self._folder_missing = 0  # how often in a row
        self._registry = AgentRegistry(spec, self._clock(), took_over=bool(lost))
        self.agents = self._registry.agents
        self.workers = {rank: WorkerState(rank) for rank in range(spec.ranks)}
        generations = list(self._record.since(0))
        self._members = Membership(spec.ranks, generations)
        for generation in generations:  # a member may have joined, and been lost again
            for member in generation["members"]:
                worker = self.workers[rank_of(member, spec.ranks)]
                worker.incarnation = max(worker.incarnation, incarnation_of(member, spec.ranks))
        self._replacements = Replacements(spec, self._record)
        self._standstills = Standstills(spec)
        self._election = SaverElection(spec.hang_s)
        self._causes = Causes(spec)
        # Of the next generation:
        self._announced_newcomers = False
        self._looked_for_room = self._delay_announced = 0.0
        self._memberless_since: float | None = None  # no member is known to live
        # Of the attempt's end:
        self._over = False  # a worker has ended in order, or failed: no generation follows
        self._finished = False  # a worker has
        self._kill_at: dict[int, float] = {}  # by rank; it is asked for its stack before
        # When the order was given first, and last: a reconnected agent gets it again.
        self._killed, self._killed_first_at, self._killed_at = False, 0.0, 0.0
        self._out_of_reach_since: float | None = None  # all members are
        self._ports_known, self._port_learned_at = 0, 0.0  # of their agents, since then
        self.outcome: dict[str, Any] | None = None
        self.changed = True  # since the last tick
        self._commands: list[tuple[int | None, dict[str, Any]]] = []
        for index in lost:
            self._lose_agent(index)

    def commands(self) -> list[tuple[int | None, dict[str, Any]]]:
        """Return and clear the pending commands: (agent index, None for all; message)."""
        commands, self._commands = self._commands, []
        return commands

    # ------------------------------------------------------------------ agents

    def agent_connected(self, index: int, workers: Iterable[Mapping[str, Any]]) -> None:
        """Register an agent that connected, perhaps again, with its workers.

        It repeats the newest event of each kind of each worker, from its start to its end: this
        coordinator may know none of them, or may have taken its decisions on all of them long ago.
        """
        self.changed = True
        known = {worker["rank"]: worker for worker in workers}
        # An agent starts its workers before it connects; a restarted one has none of the earlier.
        own_ranks = self._spec.ranks_of(index)
        earlier = [rank for rank in own_ranks if not self.workers[rank].is_gone]
        self._lose_ranks(index, [rank for rank in earlier if rank not in known])
        self._registry.connect(index, self._clock())
        # Before `_keep_members`: a worker may have ended while the link was broken.
        for rank, worker in known.items():
            state, incarnation = self.workers[rank], worker["events"][0]["incarnation"]
            handled = (state.exited or state.sleeps) and state.incarnation == incarnation
            for event in worker["events"]:
                # What it was ended for would count twice; its exit may still be news.
                if not handled or event["event"] == "exit":
                    self.handle_event(index, event)
        # What was sent while the link was broken is lost, so repeat what still holds.
        for worker in map(self.workers.__getitem__, own_ranks):
            if worker.state == "alive" and worker.killed_at is not None:
                worker.killed_at = None
                self._kill(worker.rank)
        self._keep_members(own_ranks)
        # An earlier coordinator may have announced a standstill that has ended since.
        if self._members.generation >= 0:
            self._command(index, "tell", rank=None, message=self._members.message)
        self._command(index, "tell", rank=None, message={"standstill_s": None})
        self._standstills.announce_again()
        self._announced_newcomers = False
        if self._over:
            self._command(index, "tell", rank=None, message={"left": True})
        if self._killed:
            # The first order may have been lost with the link, so sleepers are judged anew.
            self._killed_at = self._clock()
            self._command(index, "die")

    def _keep_members(self, ranks: Iterable[int]) -> None:
        """Keep members that were lost with their agent, if they live and the others have not
        continued without them.
        """
        alive = {rank for rank in ranks if self.workers[rank].state == "alive"}
        members = {self._member(rank) for rank in alive} & self._members.lost
        if not self._over:  # those whose unit is incomplete stay lost
            parts = {rank for rank in alive if not alive.issuperset(self._spec.failure_unit(rank))}
            for rank in [rank for rank in parts if self._member(rank) in members]:
                members.discard(self._member(rank))
                if self.workers[rank].killed_at is None:
                    self._kill(rank)
        if members:
            self._members.keep(members)
            self._causes.forget_losses(members)

    def heard(self, index: int) -> None:
        self.agents[index].heard = self._clock()

    def agent_disconnected(self, index: int) -> None:
        """Handle an agent whose link is closed: it ended, connects again, or follows another
        coordinator. `_check_agents` finds out.
        """
        self.changed = True
        self._registry.disconnect(index)

    def wanted_agents(self) -> list[int]:
        """Return the nodes with ranks that are to start again, but with no agent."""
        if self._over:
            return []
        nodes = {self._spec.node_of(rank) for rank in self._replacements.ranks}
        return sorted(index for index in nodes if self.agents[index].lost)

    def _lose_agent(self, index: int, cause: str = AGENT_GONE) -> None:
        self.changed = True
        self._registry.lose(index)
        ranks = [r for r in self._spec.ranks_of(index) if not self.workers[r].is_gone]
        self._lose_ranks(index, ranks, cause)

    def _lose_ranks(self, index: int, ranks: list[int], cause: str = AGENT_GONE) -> None:
        """Mark workers as lost together with their agent, with a cause that names the node."""
        self._learn_recorded_ends(index, ranks)
        ranks = [rank for rank in ranks if not self.workers[rank].is_gone]
        if not ranks:
            return
        # Out of reach is as good as ended; one that lives may come back (`_keep_members`).
        for worker in map(self.workers.__getitem__, ranks):
            worker.state, worker.wants_to_join, worker.sleeps = "ended", False, False
        end = AbnormalEnd(
            time=self._clock(),
            node=self._spec.name_of(index),
            index=index,
            rank=None,
            status=-signal.SIGKILL,  # the others treat it as killed
            why=cause,
        )
        self._on_abnormal_end(end, ranks)

    def _learn_recorded_ends(self, index: int, ranks: Iterable[int]) -> None:
        """Learn the recorded ends of those of these ranks that this coordinator never heard of:
        they may have finished under the one before, which is lost with their node.
        """
        unknown = {rank for rank in ranks if self.workers[rank].state == "expected"}
        exits: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, RunFolderError):  # none is known then
            exits = recorded_ends(self._run, self._spec.attempt, index) if unknown else []
        for event in exits:
            worker = self.workers[event["rank"]]
            if worker.rank in unknown and worker.incarnation == event["incarnation"]:
                worker.state, worker.exited = "ended", True
                self._on_exit(index, event)

    # ------------------------------------------------------------------ events
    # An event comes once, so nothing below may raise `OSError` before the event has had its effect;
    # files that cannot be read are left out. `tick` may raise: the next one decides again.

    def handle_event(self, index: int, event: Mapping[str, Any]) -> None:
        """Handle an agent's event about one of its workers."""
        self.heard(index)
        self.changed = True
        kind, worker = event["event"], self.workers[event["rank"]]
        if "seen" in event:
            worker.report = event["seen"]
        if kind == "started":
            before = worker
            worker = WorkerState(worker.rank, event["incarnation"], "alive", started=True)
            if before.incarnation == worker.incarnation:
                worker.given_up, worker.killed_at = before.given_up, before.killed_at
            self.workers[worker.rank] = worker
            self._standstills.forget(worker.rank)
            self._replacements.cancel(worker.rank)  # it lives: its agent was only late
            if self._over and not self._members.includes(worker):
                self._kill(worker.rank)  # it came too late to join
        elif kind == "exit":
            # The exit of an earlier process may come late: its successor lives.
            if worker.state != "ended" and worker.incarnation == event["incarnation"]:
                worker.state, worker.wants_to_join, worker.exited = "ended", False, True
                self._standstills.note_end(worker.rank)
                if worker.rank == self._election.saver:
                    self._election.end(self._clock())
                self._on_exit(index, event)
            elif worker.sleeps and worker.incarnation == event["incarnation"]:
                worker.sleeps, worker.exited = False, True
                self._schedule_replacement(worker.rank)
        elif kind == "stopped":
            self._check_stopped(worker, event["seconds"])
        elif kind == "standing":
            self._standstills.note(worker, event, self._clock())
        elif kind == "hangs":
            if event["silent"]:  # its latest report may be from before
                await_stack(worker, self._run)
            lines = worker.seen.stack_lines() or tail(self._run.rank_log(worker.rank))
            stalled = "asleep" if event["asleep"] else None
            self._give_up(worker, event["cause"], lines, stalled=stalled)
        elif kind == "stuck":
            # What it is stuck in was broken off for another's loss.
            self._give_up(worker, event["cause"], worker.seen.stack_lines(), own=False)
        elif kind == "begins":
            worker.code = event["code"]
        elif kind == "trains":
            worker.training = True
        elif kind == "joins":
            worker.wants_to_join = True
            self._announced_newcomers = False
        elif kind == "ready":
            worker.awaits_newcomers = event["generation"], event["updates"]
        elif kind == "can_save":
            worker.can_save = event["able"]
        elif kind == "save_ready":
            worker.can_save, worker.left_after = True, event["updates"]
            worker.failed = event.get("failed", False)
            member = self._member(worker.rank)
            if self._members.among([member]) - self._members.lost:
                self._end_others()  # it has lost a peer, whose end may not be known yet

    def _check_stopped(self, worker: WorkerState, seconds: float) -> None:
        """Give up a worker that has been stopped (SIGSTOP) for too long."""
        limit_s = self._silence_s
        if seconds < limit_s:
            return
        await_stack(worker, self._run)
        self._give_up(worker, stopped_cause(limit_s), stalled="stopped")

    def _give_up(
        self,
        worker: WorkerState,
        cause: str,
        lines: Iterable[str] = (),
        *,
        stalled: Stalled | None = None,
        own: bool = True,
    ) -> None:
        """End a worker that hangs: the others continue without it, or the attempt fails.

        Args:
            lines: of its stack or log.
            own: its own code hangs, unless it is `stalled`.
        """
        if worker.given_up:
            return
        rank = worker.rank
        worker.given_up = cause
        culprit = hanging_culprit(self._spec, rank, cause, lines)
        # Code that hangs in a rank's members twice ends the run: it would in a third, too. One that
        # has not joined keeps no other from training.
        counts = own and stalled is None and self._members.includes(worker)
        again = counts and self._members.has_hung_before(worker)
        if counts:
            self._members.hung.add(self._member(rank))
        if self._survives_losses and not again:
            self._kill(rank)
            cause = describe_hang(culprit, self.workers, self._run).cause
            self._warn(rank, f"{cause}; it is ended, and the others go on without it")
        elif not self._causes.is_known:
            self._causes.blame(culprit, stalled)
            self._command(None, "keep positions", stacks=True)
            self._kill_at[rank] = self._clock() + STACK_S

    def _on_exit(self, index: int, event: Mapping[str, Any]) -> None:
        """Handle a worker's end. Without its final message it is a failure, whatever its status."""
        rank, final_state = event["rank"], event["final_state"]
        self.workers[rank].final_state = final_state
        self._finished |= final_state == FINISHED
        if event["failure"] is not None and final_state != EVICTED:
            self._causes.add_failure(event["failure"])
        if final_state in (FINISHED, STOPPED):
            self._end_in_order()
            return
        why = self.workers[rank].given_up
        if event["failure"] is not None and event["failure"].get("excluded"):
            self._replacements.exclude(rank)
            why = event["failure"]["cause"]
        end = AbnormalEnd(
            time=self._clock() - event["ago_s"],  # a duration, since clocks of nodes differ
            node=self._spec.name_of(index),
            index=index,
            rank=rank,
            status=event["status"],
            out_of_memory=event.get("out_of_memory", False),
            why=why,
        )
        self._on_abnormal_end(end, [rank], final_state)

    def _on_abnormal_end(self, end: AbnormalEnd, ranks: list[int], final_state: str = "") -> None:
        """Record a failure, or a loss that the other workers survive."""
        members = [self._member(rank) for rank in ranks]
        lost = self._members.among(members)
        # Also true of a process that is no member, and if the loss of each member is known already.
        others_unaffected = final_state == EVICTED or lost <= self._members.lost
        taken_away = not final_state and -end.status in EXTERNAL_KILL_SIGNALS
        # Others that have finished do not redo its updates.
        survived = taken_away and self._survives_losses and not self._finished
        # By this coordinator, so it is no cause. An agent may report later what was before.
        if self._killed and end.time >= self._killed_first_at:
            return
        if not (others_unaffected or survived):
            self._causes.add_end(end)
            self._end_others()
            return
        if not lost <= self._members.lost:
            self._causes.add_loss(end, members)
        # End the workers that are lost together with these.
        units = map(self._spec.failure_unit, ranks)
        others = set(chain.from_iterable(units)).difference(ranks)
        for rank in [rank for rank in others if self.workers[rank].state != "ended"]:
            self._kill(rank)
            lost |= self._members.among([self._member(rank)])
        if self._members.lose(lost, self._clock()):
            reset_waits(self.workers.values(), self._clock())
        for rank in ranks:
            # Its "", for no message, would make a survived loss a failure of the attempt.
            self.workers[rank].final_state = None
            self._schedule_replacement(rank)

    def _schedule_replacement(self, rank: int) -> None:
        """Schedule a lost rank's next process; warn if none is started though it is expected."""
        warning = self._replacements.schedule(rank, self.workers, self._clock(), over=self._over)
        if warning is not None:
            self._warn(rank, warning)

    # ------------------------------------------------------------------ decisions that are due

    @property
    def awaits_losses(self) -> bool:
        """Return whether a loss waits for further ones."""
        return bool(self._members.lost)

    def tick(self) -> None:
        """Take the decisions that are due. Costs a look at every rank."""
        self.changed = bool(self._members.lost)  # whose decision is due in a moment
        if self.outcome is not None:
            return
        now = self._clock()
        beat_due = now - self._beat_at >= BEAT_S
        if beat_due:
            self._beat_at = now
            self._check_folder(now)
            if self._standstills.may_be_due and not self._killed:
                self._check_standstill(now)
        self._check_agents(now)
        self._check_members(now)
        if not self._over:
            if self._members.generation < 0:
                self._begin()
            # Another coordinator, which considered this one lost, may have recorded one.
            if beat_due:
                self._adopt_next()
            self._next_generation(now)
            self._grow(now)
            self._start_replacements(now)
        self._kill_hanging(now)
        self._elect_saver(now)  # it may extend the time of those that remain
        if self._kill_remaining(now):
            self._leave_sleepers(now)
            self._perhaps_over(now)

    def _check_folder(self, now: float) -> None:
        """End an attempt whose folder was removed: nothing that it computes could be saved."""
        missing = not is_folder(self._run.attempt(self._spec.attempt))
        self._folder_missing = self._folder_missing + 1 if missing else 0
        if not self._killed and self._folder_missing >= MISSING_FOLDER_CHECKS:
            cause = self._run.removed_message
            self._causes.blame(Culprit(rank=None, node=self._spec.name, cause=cause, usage=True))
            self._election.until = now  # at once, since no rank could save anything
            self._end_in_order()

    def _check_standstill(self, now: float) -> None:
        """Act on ranks that make no progress (`standstills.py`)."""
        alive = [
            worker
            for worker in self.workers.values()
            if worker.state == "alive" and self._members.includes(worker)
        ]
        unheard = {
            rank
            for index in self.agents
            if not self._registry.is_heard(index, now)
            for rank in self._spec.ranks_of(index)
        }
        finding = self._standstills.check(now, alive, over=self._over, unheard=unheard)
        if finding.informs:
            self._to_worker(None, standstill_s=finding.standstill_s)
        if finding.warning is not None:
            self._command(None, "stacks")
            self._warn(0, finding.warning, about="run")
        blamed = finding.blamed
        if blamed is None or (finding.ends_run and self._causes.is_known):
            return
        lines = blamed.seen.stack_lines() or tail(self._run.rank_log(blamed.rank))
        if not finding.ends_run:
            self._give_up(blamed, finding.cause, lines)
            return
        self._causes.blame(
            hanging_culprit(self._spec, blamed.rank, finding.cause, lines, complete=True)
        )
        self._end_others()

    def _check_agents(self, now: float) -> None:
        """Lose agents that are silent, have ended, or did not connect in time."""
        formed = self._members.generation >= 0
        for loss in self._registry.check(now, self._silence_s, formed=formed):
            if loss.disconnects:
                self._command(loss.index, "disconnect")
            self._lose_agent(loss.index, loss.cause)

    def _check_members(self, now: float) -> None:
        """Form no further generation once no member lives that could admit others."""
        if any(self._members.includes(worker) for worker in self.workers.values()):
            self._memberless_since = None
            return
        self._memberless_since = self._memberless_since or now
        # A node that is out of reach may connect again, with members that train.
        away = any(self.agents[self._node_of(member)].lost for member in self._members.current)
        if not away or now - self._memberless_since >= self._spec.silence_s:
            self._end_in_order()

    # ------------------------------------------------------------------ generations

    def _begin(self) -> None:
        """Publish the first generation once all workers are ready to train."""
        if all(worker.code is not None for worker in self.workers.values()):
            self._publish(0, self._members.current, code=self.workers[0].code)

    def adopt_generations(self) -> None:
        """Adopt what another coordinator has recorded while this one was stopped."""
        while self._adopt_next():
            pass

    def _adopt_next(self) -> bool:
        """Adopt the next generation if another coordinator has recorded it; return whether so."""
        generation = self._record.read(self._members.generation + 1)
        if generation is not None:
            self._accept(generation)
        return generation is not None

    def _next_generation(self, now: float) -> None:
        """Publish a generation without the lost members, once all other agents are known."""
        if not self._members.lost or now - self._members.noticed_at < LOSS_WAIT_S:
            return
        remaining = self._members.remaining
        if not remaining:
            return
        # Those that are lost together should cost one generation; but agents that are only late
        # must not keep the others from the next one, of which their ranks are members.
        if self._registry.awaits_connections(now):
            return
        is_smaller = self._is_smaller_half(now, len(remaining))
        if is_smaller and now - self._members.noticed_at < self._spec.silence_s:
            return
        gone, why = sorted(self._members.lost), self._causes.describe_losses(self._members.lost)
        self._publish(self._members.generation + 1, remaining, gone=gone, why=why)

    def _is_smaller_half(self, now: float, remaining: int) -> bool:
        """Return whether the unreachable workers, not known to have died, outnumber this side's.

        They may be about to continue without it.
        """
        if 2 * len(self._members.lost) <= len(self._members.current):
            return False
        nodes = [self._node_of(member) for member in self._members.lost]
        lost = Counter(node for node in nodes if self.agents[node].lost)
        # Workers end with their agent, so behind a closed port none continues.
        ended = {node for node in lost if self.agents[node].port is Port.CLOSED}
        ports = self._registry.ports(lost.keys() - ended, now, self._members.noticed_at)
        ended.update(node for node, port in ports.items() if port is Port.CLOSED)
        return sum(count for node, count in lost.items() if node not in ended) > remaining

    def _grow(self, now: float) -> None:
        """Admit new workers at a boundary, once every member waits there for them.

        If they died meanwhile, the same members continue.
        """
        if self._members.lost or self._members.generation < 0:
            return
        member_ranks = {rank_of(member, self._ranks) for member in self._members.current}
        waiting = {
            worker.rank
            for worker in self.workers.values()
            if worker.wants_to_join and worker.state == "alive" and worker.rank not in member_ranks
        }
        complete = [r for r in sorted(waiting) if waiting.issuperset(self._spec.failure_unit(r))]
        newcomers = [self._member(rank) for rank in complete]
        announce = newcomers and not self._announced_newcomers
        if announce and now - self._looked_for_room > BEAT_S:
            self._looked_for_room = now
            # Without room for it the members would wait at the boundary in vain.
            if self._record.has_room([*self._members.current, *newcomers]):
                self._announced_newcomers = True
                # One rank is enough: at the next boundary it informs all others.
                leader = rank_of(self._members.current[0], self._ranks)
                self._to_worker(leader, newcomers=True)
        boundaries = [worker.awaits_newcomers for worker in self._processes()]
        number = self._members.generation
        if all(boundary is not None and boundary[0] == number for boundary in boundaries):
            updates = max(boundary[1] for boundary in boundaries if boundary is not None)
            joined = {str(member): [] for member in newcomers}
            members = [*self._members.current, *newcomers]
            self._publish(number + 1, members, joined=joined, updates=updates)

    def _start_replacements(self, now: float) -> None:
        """Start the next processes of the ranks that are due, where an agent can."""
        for unit in self._replacements.due_units(now):
            agent = self.agents[self._spec.node_of(unit[0])]
            if not agent.is_reachable:
                continue
            incarnation = 1 + max(self.workers[rank].incarnation for rank in unit)
            for rank in unit:
                self._replacements.cancel(rank)
                self._command(agent.index, "start", rank=rank, incarnation=incarnation)
                self.workers[rank] = WorkerState(rank, incarnation)

    def _publish(self, number: int, members: list[int], **more: Any) -> None:
        """Publish a generation; without disk space, retry at the next tick. Those that wait for it
        learn once a second that it is still to come.
        """
        # A later coordinator could learn it from no agent that has replaced these processes.
        if self._members.hung:
            more["hung"] = sorted(self._members.hung)
        try:
            # Another coordinator's, if that one was faster: the first record of a number counts.
            generation = self._record.publish(number, members, **more, time=time.time())
        except OSError as error:
            if not self._delay_announced:
                log.warning("generation %d is recorded later: %s", number, error)
            if self._clock() - self._delay_announced >= BEAT_S:
                self._delay_announced = self._clock()
                self._to_worker(None, delayed=True)
            return
        self._accept(generation)

    def _accept(self, generation: Mapping[str, Any]) -> None:
        """Adopt the recorded generation and send it to all workers."""
        self._members.adopt(generation, self._clock())
        self._announced_newcomers, self._looked_for_room, self._delay_announced = False, 0.0, 0.0
        reset_waits(self.workers.values(), self._clock())
        for worker in self.workers.values():
            if worker.wants_to_join and self._members.among([self._member(worker.rank)]):
                worker.wants_to_join = False
        self._to_worker(None, **self._members.message)

    # ------------------------------------------------------------------ the end

    def _end_in_order(self) -> None:
        """Form no further generation and replace no worker, since a worker has ended."""
        if not self._over:
            self._over = True
            self._replacements.cancel_all()
            self._to_worker(None, left=True)
            for worker in self.workers.values():
                if worker.state == "alive" and not self._members.includes(worker):
                    self._kill(worker.rank)

    def _end_others(self) -> None:
        """Give the workers that a failed one leaves behind a moment to write what they saw."""
        self._end_in_order()
        if self._election.until is None:
            self._command(None, "keep positions", stacks=False)
            self._to_worker(None, failed=True)
            self._election.begin(self._clock())

    def _kill_hanging(self, now: float) -> None:
        """Kill hanging ranks that have had time to write their stacks; the attempt fails."""
        for rank in [rank for rank, at in self._kill_at.items() if now >= at]:
            del self._kill_at[rank]
            self._kill(rank)
            self._end_others()  # a process that sleeps in the kernel may not end

    def _elect_saver(self, now: float) -> None:
        """Choose who saves the last boundary of a failed attempt, if due (`saver_election.py`)."""
        if self._election.until is None or self._killed or self._election.saver is not None:
            return
        # Ranks whose weights differ must not save them: which are right is not known.
        if self._causes.replicas_differ:
            return
        self._election.elect(now, self._live_members)
        if self._election.saver is not None:
            self._to_worker(None, saver=self._election.saver)

    def _kill_remaining(self, now: float) -> bool:
        """Kill the workers that remain of a failed attempt, once their time is up.

        Returns:
            Whether the attempt may end now. If all that failed so far only lost a peer, and an
            agent is silent, its node is the root cause: then neither may a sleeper count as a
            cause, nor the outcome be written, before that node is lost.
        """
        until = self._election.until
        if self._killed or until is None or now < until:
            return True
        if self._causes.are_secondary and self._registry.is_any_silent(now):
            return False
        if self._election.awaits_answer(now, self._live_members):
            return False
        self._killed, self._killed_first_at, self._killed_at = True, now, now
        self._command(None, "die")
        return True

    def _leave_sleepers(self, now: float) -> None:
        """Count processes as ended that SIGKILL does not end: asleep in the kernel, they compute
        nothing any more, and may wake at any time or never.
        """
        for worker in self.workers.values():
            killed_at = self._killed_at if self._killed else worker.killed_at
            index = self._spec.node_of(worker.rank)
            # Over a broken link neither the order nor the process's end may have come.
            if worker.state != "alive" or not self.agents[index].connected:
                continue
            # A late agent may not have reported the end of the process yet.
            heard_at = now if index == self._spec.index else self.agents[index].heard or 0.0
            if killed_at is None or heard_at - killed_at < KILL_S:
                continue
            worker.state, worker.wants_to_join, worker.sleeps = "ended", False, True
            self._standstills.note_end(worker.rank)
            sleeps = f"SIGKILL has not ended it in {KILL_S:g} s: it sleeps in the kernel"
            self._warn(worker.rank, sleeps)
            end = AbnormalEnd(
                time=now,
                node=self._spec.name_of(index),
                index=index,
                rank=worker.rank,
                status=-signal.SIGKILL,
                why="; ".join(filter(None, [worker.given_up, sleeps])),
            )
            self._on_abnormal_end(end, [worker.rank])

    def _perhaps_over(self, now: float) -> None:
        """Write the outcome once all workers have ended and none will be replaced."""
        if any(worker.state != "ended" for worker in self.workers.values()):
            return
        if self._replacements.ranks:
            return
        # While this agent was stopped, the others may have continued without it, and its ranks may
        # have failed, since it sent them no generation.
        if self._adopt_next():
            return
        if self._leaves_to_others(now):
            return
        self.outcome = self._causes.outcome(self.workers, self._record.losses())
        path = self._run.outcome(self._spec.attempt)
        try:
            write_json(path, self.outcome)
        except OSError as error:  # a full disk: the agents' output informs the launcher
            log.warning("the outcome could not be written: %s", error)
        self._command(None, "end")

    def _leaves_to_others(self, now: float) -> bool:
        """Return whether the attempt's outcome is left to nodes that may continue without this one.

        If some of the members may live, the attempt continues there. Where they can be reached,
        this agent was stopped, or their link was broken.
        """
        if self._members.generation <= 0:
            return False
        nodes = {self._node_of(member) for member in self._members.current}
        if not all(self.agents[index].lost for index in nodes):
            self._out_of_reach_since = None
            return False
        if self._out_of_reach_since is None:
            self._out_of_reach_since, self._ports_known = now, -1
        ports = self._registry.ports(nodes, now, self._out_of_reach_since)
        again = Port.OPEN in ports.values()
        all_known = len(ports) == len(nodes)
        if len(ports) > self._ports_known:
            self._ports_known, self._port_learned_at = len(ports), now
        # In the next turns the others are probed. One whose address stays unreadable counts as
        # silent after a while, or else this agent would wait for the end of its allocation.
        if not all_known and not again and now - self._port_learned_at < self._spec.silence_s:
            return True
        if all_known and all(port is Port.CLOSED for port in ports.values()):
            return False
        log.info(
            "the other nodes continue without this one; its agent ends%s",
            ", and the next one joins them" * again,
        )
        for agent in self.agents.values():
            if not agent.lost:  # a lost one that has connected again may hold the members
                self._command(agent.index, "end", again=again)
        return True

    # ------------------------------------------------------------------ lookups and commands

    @property
    def _survives_losses(self) -> bool:
        """Return whether the others continue without a lost worker: they have begun to train."""
        return self._spec.survive and self._members.generation >= 0

    @property
    def _silence_s(self) -> float:
        """Return for how long an agent or a stopped worker may be silent."""
        return self._spec.silence_s if self._survives_losses else self._spec.heartbeat_s

    def _member(self, rank: int) -> int:
        return self._members.number_of(self.workers[rank])

    def _processes(self) -> list[WorkerState]:
        """Return the newest process of each rank that has a member, in the members' order."""
        return [self.workers[rank_of(member, self._ranks)] for member in self._members.current]

    @property
    def _live_members(self) -> list[WorkerState]:
        return [worker for worker in self._processes() if self._members.includes(worker)]

    def _node_of(self, member: int) -> int:
        return self._spec.node_of(rank_of(member, self._ranks))

    def _command(self, agent: int | None, command: str, **values: Any) -> None:
        self._commands.append((agent, {"command": command, **values}))

    def _kill(self, rank: int) -> None:
        worker = self.workers[rank]
        worker.killed_at = worker.killed_at or self._clock()
        self._command(self._spec.node_of(rank), "kill", rank=rank)

    def _to_worker(self, rank: int | None, **message: Any) -> None:
        agent = None if rank is None else self._spec.node_of(rank)
        self._command(agent, "tell", rank=rank, message=message)

    def _warn(self, rank: int, sentence: str, about: About = "rank") -> None:
        path = self._run.warnings(self._spec.attempt, self._spec.node_of(rank))
        warn_of(path, rank, sentence, about=about)
