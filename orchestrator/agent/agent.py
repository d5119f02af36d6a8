"""The agent: the process that owns a node's workers.

It starts and watches the node's workers and follows the coordinator, the most senior live agent
(`coordinator.py`). When the coordinator fails, the next agent in seniority takes over. A worker
connects only to its own node's agent.

The loop has one thread: an agent forks, and a fork keeps only the thread that forked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import selectors
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from orchestrator.agent.agent_registry import COME_S, MOST_PROBES, REACH_S
from orchestrator.agent.coordinator import LOSS_WAIT_S, Coordinator
from orchestrator.agent.links import (
    ANSWER,
    Link,
    Peer,
    Port,
    authenticate,
    connect,
    line_of,
    probe_ports,
)
from orchestrator.agent.liveness import (
    BEAT_S,
    FINISHED,
    LEAST_SILENCE_S,
    STOPPED,
    AwakeClock,
)
from orchestrator.agent.node_spec import (
    NodeSpec,
    agent_file,
    publish_agent,
    record_ends,
    secret_of,
)
from orchestrator.agent.programs import host_rendezvous
from orchestrator.agent.workers import STOP_SIGNALS, Workers
from orchestrator.engine.common.rendezvous import listen
from orchestrator.errors import RunFolderError
from orchestrator.notify import Notifier
from orchestrator.rundir.files import await_disk_space, read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.generations import GenerationRecord, message_of

log = logging.getLogger(__name__)

POLL_S = 0.1
MAX_STRANGERS = 64
"""Connections that have not identified themselves, beyond one of each node."""
STRANGER_S = 1.0
"""Time for one of them to identify itself, if others wait."""
MOST_ACCEPTED = 256
"""Connections that are accepted in one turn, which also has other work."""
MOST_REFUSALS = 3
"""Before an address is taken to be another agent's. One may be a connection that broke."""
MOST_ONE_BY_ONE = 2
"""Candidates that are lost before others are probed ahead: each costs every agent a file."""
RANKS_A_SECOND = 200_000
"""A tick of the coordinator looks at all ranks; at most so many a second."""


class Agent:
    """Agent of one node.

    Args:
        control: a pipe that closes when the launcher ends, or wants all processes ended. That
            launcher also sends the run's messages. None on a cluster whose scheduler ends them.
        report: a pipe for the outcome when the disk is full.
        on_beat: called once a second with the nodes whose agents the coordinator, if that is this
            agent, wants again; returns whether this attempt is to end: a newer one has replaced it,
            say.
        on_outcome: called by the coordinator once there is an outcome, with it, and with whether
            the first node's agent is lost; replaces a lost batch script.
    """

    def __init__(
        self,
        spec: NodeSpec,
        control: int | None = None,
        report: int | None = None,
        *,
        on_beat: Callable[[Collection[int]], bool] = lambda _: False,
        on_outcome: Callable[[Mapping[str, Any], bool], None] = lambda _, __: None,
    ) -> None:
        self._on_beat, self._on_outcome = on_beat, on_outcome
        self._spec, self._control, self._report_to = spec, control, report
        self._run = RunDir(spec.run)
        self._notifier = Notifier(self._run)
        self._selector = selectors.DefaultSelector()
        self._secret = await_disk_space(lambda: secret_of(self._run, spec.attempt), log.warning)
        self._listener = listen(spec.address)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._unauthenticated: set[Link] = set()
        self._followers: dict[int, Link] = {}
        self._early: dict[int, list[dict[str, Any]]] = {}  # before this agent coordinates
        self._coordinator_link: Link | None = None
        self._refusals = 0  # links in a row that were closed before anything came over them
        self._was_heard = False  # the coordinator has sent something on this link
        self._clock, self._suspended_s = AwakeClock(), 0.0
        self._learn_at = 0.0  # what was missed in a suspension is read again from then on
        self._began = self._clock()
        self._lost_in_row = 0  # candidates for the coordinator
        self._unreachable: dict[tuple[int, int], float] = {}  # since when, by seniority
        self._lost_peers: set[tuple[int, int]] = set()  # (incarnation, index) of lost agents
        # Of the agent that the one followed here follows itself.
        self._referred: tuple[int, int] | None = None
        self._peers: dict[int, Peer] = {}  # newest known agent of each node, by its file
        self._peers_read: dict[int, float] = {}
        self._generation: dict[str, Any] | None = None  # newest known, as workers get it
        self._generation_read = -BEAT_S
        self._coordinator: Coordinator | None = None
        self._ticked = 0.0
        self._ended_at: float | None = None  # all workers of this node had ended in order
        self._ends_recorded = False
        self._stops: list[str] = []  # names of signals that the workers do not know yet
        self._dying = self._over = self._again = False
        self._descriptor_limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._end_rendezvous: Callable[[], None] = lambda: None  # of a program's ranks
        self._pipe = os.pipe()  # written to by signals
        for end in self._pipe:
            os.set_blocking(end, False)
        self._selector.register(self._pipe[0], selectors.EVENT_READ, self._drain)
        if control is not None:
            ended = partial(self._end_with_launcher, control)
            self._selector.register(control, selectors.EVENT_READ, ended)
        self._workers = Workers(
            spec=spec,
            selector=self._selector,
            report=self._report,
            clock=self._clock,
            on_fork=self._close_in_fork,
        )
        port = int(self._listener.getsockname()[1])
        self._published = await_disk_space(lambda: publish_agent(spec, port), log.warning)

    def _close_in_fork(self) -> None:
        """Release the agent's resources in a new worker."""
        resource.setrlimit(resource.RLIMIT_NOFILE, self._descriptor_limits)
        for descriptor in (*self._pipe, self._control, self._report_to):
            if descriptor is not None:
                os.close(descriptor)
        self._listener.close()
        for link in self._links():
            link.close()

    # ------------------------------------------------------------------ the loop

    def serve(self) -> bool:
        """Run the node until the coordinator ends the attempt; return whether another agent is to
        join the others, which continue without this one.

        Raises:
            BecomeWorker: in each worker that is forked.
        """
        self._handle_signals()
        # The usual limit of 1,024 descriptors is too low for the links of a thousand nodes. Workers
        # get theirs back: a user's program may call `select`, or close all that it could have.
        with contextlib.suppress(OSError, ValueError):  # a container may forbid it
            most = self._descriptor_limits[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        if not self._spec.incarnation:
            if self._spec.index == 0:
                self._end_rendezvous = host_rendezvous(self._spec)
            for rank in self._spec.ranks_of(self._spec.index):
                self._workers.start(rank, 0)
        errors = 0
        self._beat_at = self._clock()
        while not self._over:
            try:
                self._turn()
                errors = 0
            # Of a shared file system, say: the workers need their agent.
            except (OSError, RunFolderError) as error:
                errors += 1
                if errors > 100:  # in a row
                    raise
                log.warning("%s; trying again", error)
                time.sleep(POLL_S)
        self._workers.kill_all(self._notifier.senders)
        self._notifier.wait()
        self._workers.end_all()
        if self._coordinator is not None and self._coordinator.outcome is not None:
            for link in self._links():
                link.close()  # the others are done
            self._on_outcome(self._coordinator.outcome, self._coordinator.agents[0].lost)
        return self._again

    def _turn(self) -> None:
        """Handle what has happened since the last turn."""
        self._clock()
        suspended_s = self._clock.suspended_s
        if suspended_s > self._suspended_s and self._clock() >= self._learn_at:
            try:
                self._learn_what_was_missed()
                self._suspended_s = suspended_s
            except (OSError, RunFolderError) as error:  # heartbeats must not wait for it
                self._learn_at = self._clock() + BEAT_S
                log.warning("what others have done meanwhile is not known yet: %s", error)
        if self._over:
            return
        self._follow()
        for key, _ in self._selector.select(self._pause_s()):
            key.data()
        if self._dying:
            self._workers.kill_all(self._notifier.senders)
        self._workers.reap()
        self._workers.check_programs()
        now = self._clock()
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self._beat()
        if self._coordinator is not None:
            self._tick(self._coordinator)
            outcome = self._coordinator.outcome
            # The launcher gets an outcome that the disk had no space for. It reads the pipe after
            # the agents' end, so all must fit its 64 KiB; a character takes up to 12 bytes in JSON.
            if outcome is not None and self._report_to is not None and not self._is_over():
                if culprit := outcome["culprit"]:
                    lines = [line[:150] for line in culprit["log_tail"]]
                    outcome = {**outcome, "culprit": {**culprit, "log_tail": lines}}
                os.write(self._report_to, json.dumps(outcome).encode())
            self._obey_coordinator()

    def _learn_what_was_missed(self) -> None:
        """Learn what others have done while this agent was stopped, before it handles any event:
        its workers have lost their peers, which may have continued without them.
        """
        if self._is_replaced():
            log.info("this node has a newer agent; this one ends")
            self._over = True
        elif self._coordinator is not None:
            self._coordinator.adopt_generations()

    def _tick(self, coordinator: Coordinator) -> None:
        """Let the coordinator decide, in this turn or in a later one.

        A turn of a large run is one of hundreds in a second, for a heartbeat each.
        """
        now = self._clock()
        pause_s = self._spec.ranks / RANKS_A_SECOND
        if now - self._ticked >= (pause_s if coordinator.changed else max(POLL_S, pause_s)):
            self._ticked = now
            coordinator.tick()

    def _pause_s(self) -> float:
        """Return how long to wait for events, at most until the next decision."""
        awaits = self._coordinator is not None and self._coordinator.awaits_losses
        return LOSS_WAIT_S / 2 if awaits else POLL_S

    def _handle_signals(self) -> None:
        """Handle stop signals here only; workers ignore them and receive a message."""

        def note_stop(number: int, _: Any) -> None:
            self._stops.append(signal.Signals(number).name)

        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in STOP_SIGNALS:
            signal.signal(number, note_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGCHLD))

    def _drain(self) -> None:
        os.read(self._pipe[0], 4096)
        while self._stops:
            self._workers.stop(self._stops.pop(0))

    def _end_with_launcher(self, control: int) -> None:
        if not os.read(control, 64):
            self._over = True

    def _links(self) -> list[Link]:
        up = [self._coordinator_link] if self._coordinator_link is not None else []
        return [*self._followers.values(), *self._unauthenticated, *up]

    def _beat(self) -> None:
        now = self._clock()
        # Heartbeats come first: what follows reads files, and may fail.
        line = line_of({})
        for link in self._links():
            if link.peer_index is not None:
                link.send_line(line)
            elif now - link.heard > self._spec.silence_s:
                self._close(link)  # it has not identified itself
        silence_s = max(self._silence_s, LEAST_SILENCE_S)
        if self._coordinator_link is not None and now - self._coordinator_link.heard > silence_s:
            self._leave_coordinator(lost=True)
        self._workers.judge(self._silence_s)
        self._return_to_coordinator()
        if self._coordinator is not None and self._control is None:
            self._notifier.send()
        if self._on_beat(self._coordinator.wanted_agents() if self._coordinator else ()):
            log.info("a newer attempt has begun, or the job has ended; this attempt ends")
            self._over = True
        self._record_ends(now)

    def _record_ends(self, now: float) -> None:
        """Record that all workers of this node have ended in order, while others still work. If
        this agent coordinates and is lost, no other one has heard of it.

        Most attempts end within a second of that, and nothing is recorded.
        """
        if self._ends_recorded or self._spec.nodes == 1 or self._workers.alive:
            return
        exits = [self._workers.exit_of(worker) for worker in self._workers.all.values()]
        if not exits or any(each["final_state"] not in (FINISHED, STOPPED) for each in exits):
            return
        self._ended_at = self._ended_at or now
        if now - self._ended_at >= BEAT_S:
            with contextlib.suppress(OSError):  # a full disk: the next beat tries again
                record_ends(self._spec, exits)
                self._ends_recorded = True

    @property
    def _silence_s(self) -> float:
        """Return for how long the coordinator may be silent, or a worker's child be stopped. Before
        the first generation no other one could continue without it.
        """
        return self._spec.heartbeat_s if self._generation is None else self._spec.silence_s

    # ------------------------------------------------------------------ events and commands

    def _report(self, event: dict[str, Any]) -> None:
        """Report an event about a worker to the coordinator."""
        if self._coordinator is not None:
            self._coordinator.handle_event(self._spec.index, event)
        elif self._coordinator_link is not None:
            self._coordinator_link.send(**event)

    def _state_of_workers(self) -> list[dict[str, Any]]:
        """Return what a new coordinator needs to know of this node's workers."""
        states: list[dict[str, Any]] = []
        for worker in self._workers.all.values():
            events: list[dict[str, Any]] = [
                {"event": "started", "rank": worker.rank, "incarnation": worker.incarnation}
            ]
            events += worker.latest_events.values()
            if worker.status is not None:
                events.append(self._workers.exit_of(worker))
            states.append({"rank": worker.rank, "events": events})
        return states

    def _obey_coordinator(self) -> None:
        assert self._coordinator is not None  # noqa: S101  # called where there is one
        commands, to_all = self._coordinator.commands(), list[dict[str, Any]]()
        for agent, command in commands:
            if agent is None:
                to_all.append(command)
                continue
            self._relay(*to_all)
            to_all.clear()
            if agent in self._followers:
                if command["command"] == "disconnect":
                    self._close(self._followers[agent])
                else:
                    self._followers[agent].send(**command)
        self._relay(*to_all)
        for agent, command in commands:
            if agent in (None, self._spec.index):
                self._obey(command)

    def _relay(self, *commands: Mapping[str, Any]) -> None:
        """Send commands to all followers, together."""
        if self._followers and commands:
            lines = b"".join(map(line_of, commands))
            for link in list(self._followers.values()):
                link.send_line(lines)

    def _obey(self, command: Mapping[str, Any]) -> None:
        kind = command["command"]
        if kind == "start" and command["rank"] in self._spec.ranks_of(self._spec.index):
            self._workers.start(command["rank"], command["incarnation"])
        elif kind == "kill":
            self._workers.kill(command["rank"])
        elif kind == "tell":
            if "generation" in command["message"]:
                self._generation = command["message"]
            self._workers.send(command["rank"], **command["message"])
        elif kind == "keep positions":
            self._workers.keep_positions(stacks=command["stacks"])
        elif kind == "stacks":
            self._workers.write_stacks()
        elif kind == "refer":
            self._referred = None if command["to"] is None else tuple(command["to"])
        elif kind == "die":
            self._dying = True
        elif kind == "end":
            self._end_rendezvous()
            self._notifier.wait()
            self._workers.await_leftovers()
            self._over, self._again = True, command.get("again", False)
            if self._again:
                self._again = not self._is_replaced()

    # ------------------------------------------------------------------ the coordinator

    def _first_node(self) -> Peer | None:
        """Return the first node's agent; None before it has published its address."""
        peer = self._peers.get(0) or agent_file(self._run, self._spec.attempt, 0)
        if peer is not None:
            self._peers[0] = peer
        return peer

    def _peer(self, index: int) -> Peer | None:
        """Return the newest agent of a node that is not known to be lost; None without one.

        Its file is read when that is not known yet, and once a second while that agent is lost, so
        that all agents together read a number of files that grows with the number of nodes, and not
        with its square.
        """
        peer, now = self._peers.get(index), self._clock()
        missing = peer is None or peer.seniority in self._lost_peers
        if missing and now - self._peers_read.get(index, -BEAT_S) >= BEAT_S:
            self._peers_read[index] = now
            peer = agent_file(self._run, self._spec.attempt, index)
            if peer is not None:
                self._peers[index] = peer
        return None if peer is None or peer.seniority in self._lost_peers else peer

    def _seniors(self) -> Iterator[Peer]:
        """Yield the other agents that are more senior than this one, the most senior first.

        The first ones need no look at the files of the others.
        """
        own, restarted = self._published.seniority, list[Peer]()
        for index in range(self._spec.nodes):
            if index == self._spec.index:
                if not self._spec.incarnation:
                    return
                continue
            if (peer := self._peer(index)) is None:
                continue
            if peer.incarnation:
                restarted.append(peer)
            else:
                yield peer
        yield from (
            peer
            for peer in sorted(restarted, key=lambda peer: peer.seniority)
            if peer.seniority < own
        )

    def _follow(self) -> None:
        """Connect to the coordinator, or become the coordinator."""
        if self._coordinator is not None or self._coordinator_link is not None:
            return
        now = self._clock()
        # The first node's agent coordinates at the start, however late it comes; until then the
        # files of the other nodes need not be read.
        at_start = not self._lost_peers and self._spec.index > 0
        first_node = self._first_node() if at_start else None
        if at_start and first_node is None and now - self._began < self._spec.join_s:
            time.sleep(POLL_S / 2)
            return
        if first_node is not None and not first_node.incarnation:
            first = first_node
        elif (first := next(self._seniors(), None)) is None:
            self._take_over()
            return
        try:
            link = connect(first, secret=self._secret, node=self._spec.index)
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
            self._lose_candidates(first, Port.CLOSED if refused else Port.SILENT)
            return
        self._lost_in_row, self._was_heard = 0, False
        self._unreachable.clear()
        self._coordinator_link, self._coordinator_peer = link, first
        link.heard = self._clock()
        self._selector.register(link.socket, selectors.EVENT_READ, self._hear_coordinator)
        link.send(workers=self._state_of_workers())

    def _lose_candidates(self, first: Peer, port: Port) -> None:
        """Lose a candidate to which no connection is possible, at once or after a while.

        After two in a row a whole rack may be lost: then others are probed as well. Of silent ones,
        as of a rack without power, the times run together.
        """
        now, ahead, lost = self._clock(), 0, list[Peer]()
        if self._lost_in_row >= MOST_ONE_BY_ONE:
            ahead = MOST_PROBES if port is Port.SILENT else min(MOST_PROBES, 2 * self._lost_in_row)
        peers = {peer.seniority: peer for peer in islice(self._seniors(), 1, 1 + ahead)}
        for seniority, state in {first.seniority: port, **probe_ports(peers, REACH_S)}.items():
            peer = peers.get(seniority, first)
            # This agent is as patient as a coordinator is with agents that connect late.
            since = self._unreachable.setdefault(seniority, now)
            if state is Port.OPEN:
                del self._unreachable[seniority]
            elif state is Port.CLOSED or now - since > self._silence_s + COME_S:
                lost.append(peer)
        if lost:
            self._lose(*lost)

    def _lose(self, *candidates: Peer) -> None:
        """Follow these agents no more; end with the attempt if its outcome is written."""
        self._refusals = 0
        self._lost_in_row += len(candidates)
        self._lost_peers.update(peer.seniority for peer in candidates)
        if self._is_over():
            self._over = True

    def _is_over(self) -> bool:
        return read_json(self._run.outcome(self._spec.attempt)) is not None

    def _take_over(self) -> None:
        lost = {index for _, index in self._lost_peers if self._peer(index) is None}
        log.info("this agent coordinates; lost before it: %s", sorted(lost) or "none")
        self._coordinator = Coordinator(self._spec, lost, self._clock)
        self._relay({"command": "refer", "to": None})
        self._coordinator.agent_connected(self._spec.index, self._state_of_workers())
        for index, messages in self._early.items():
            for message in messages:
                self._take_message(self._followers[index], message)
        self._early.clear()
        self._obey_coordinator()

    def _hear_coordinator(self) -> None:
        assert self._coordinator_link is not None  # noqa: S101  # its socket is registered
        messages = self._coordinator_link.receive()
        if messages is None:
            # The coordinator may live: `_follow` connects to it again. But links over which it
            # never sent anything were closed by another agent at its address.
            self._refusals += not self._was_heard
            self._leave_coordinator(lost=self._refusals >= MOST_REFUSALS or self._is_over())
            return
        self._coordinator_link.heard, self._was_heard = self._clock(), True
        self._refusals = 0
        for message in messages:
            if "command" in message:
                self._obey(message)
                self._relay(message)  # followers are cut off from the coordinator

    def _return_to_coordinator(self) -> None:
        """Follow a silent coordinator again, if the agent followed instead has not lost it.

        Only once all workers have ended: the coordinator, which did not hear this agent, has
        evicted them.
        """
        if self._coordinator_link is None or self._referred not in self._lost_peers:
            return
        if not self._workers.alive:
            self._lost_peers.discard(self._referred)
            self._referred = None
            self._leave_coordinator(lost=False)

    def _leave_coordinator(self, *, lost: bool) -> None:
        assert self._coordinator_link is not None  # noqa: S101  # there was one
        self._selector.unregister(self._coordinator_link.socket)
        self._coordinator_link.close()
        self._coordinator_link = None
        self._referred = None  # another coordinator refers again, if it does
        if lost:
            self._lose(self._coordinator_peer)
        if self._is_replaced():
            log.info("this node has a newer agent; this one ends")
            self._over = True

    def _is_replaced(self) -> bool:
        """Return whether this node has a newer agent: while this one was stopped, the coordinator
        may have had another one started. Both would report the same ranks.
        """
        newest = agent_file(self._run, self._spec.attempt, self._spec.index)
        return newest is not None and newest != self._published

    # ------------------------------------------------------------------ followers

    def _accept(self) -> None:
        """Accept the connections that wait: after a takeover, all agents connect together."""
        now = self._clock()
        for _ in range(MOST_ACCEPTED):
            full = len(self._unauthenticated) >= MAX_STRANGERS + self._spec.nodes
            if full and now - self._oldest_stranger().heard < STRANGER_S:
                return  # others wait in the kernel, until those before have been heard
            try:
                link = Link(self._listener.accept()[0], heard=now)
            except BlockingIOError:
                return
            except OSError:  # it has closed again, or no descriptor is left
                if self._unauthenticated:
                    self._close(self._oldest_stranger())
                return
            if full:
                self._close(self._oldest_stranger())
            self._unauthenticated.add(link)
            hear = partial(self._hear_follower, link)
            self._selector.register(link.socket, selectors.EVENT_READ, hear)

    def _oldest_stranger(self) -> Link:
        return min(self._unauthenticated, key=lambda link: link.heard)

    def _hear_follower(self, link: Link) -> None:
        if link.socket.fileno() < 0:  # closed by an event before this one
            return
        messages = link.receive()
        if messages is None:
            self._close(link)
            return
        link.heard = self._clock()
        for message in messages:
            if link.socket.fileno() < 0:
                return
            self._take_message(link, message)

    def _take_message(self, link: Link, message: dict[str, Any]) -> None:
        if link.peer_index is None:
            index = authenticate(message, secret=self._secret, me=self._published.seniority)
            if index is None or not 0 <= index < self._spec.nodes:
                self._close(link)
                return
            if index == self._spec.index:  # no agent: it asks whether this one lives
                link.send_line(ANSWER)
                self._close(link)
                return
            link.peer_index = index
            self._unauthenticated.discard(link)
            if index in self._followers:
                self._close(self._followers[index])
            self._followers[index] = link
            return
        if self._coordinator is not None:
            if "workers" in message:
                self._coordinator.agent_connected(link.peer_index, message["workers"])
            elif "event" in message:
                self._coordinator.handle_event(link.peer_index, message)
            else:
                self._coordinator.heard(link.peer_index)
            return
        # The peer has lost the agents before this one; either this one loses them as well, or the
        # peer is cut off.
        self._early.setdefault(link.peer_index, []).append(message)
        if "workers" not in message:
            return
        if self._coordinator_link is not None:
            link.send(command="refer", to=self._coordinator_peer.seniority)
        if (newest := self._newest_generation()) is not None:
            link.send(command="tell", rank=None, message=newest)

    def _newest_generation(self) -> dict[str, Any] | None:
        """Return the message of the newest generation, for followers that come before this agent
        coordinates; None before the first. The record is read once a second, however many come.
        """
        now = self._clock()
        if now - self._generation_read >= BEAT_S:
            self._generation_read = now
            try:
                newest = GenerationRecord(self._run.attempt(self._spec.attempt)).newest()
            except (OSError, RunFolderError) as error:  # followers get it from the next coordinator
                log.warning("the newest generation is not passed on: %s", error)
            else:
                self._generation = None if newest is None else message_of(newest)
        return self._generation

    def _close(self, link: Link) -> None:
        if link.socket.fileno() >= 0:
            self._selector.unregister(link.socket)
            link.close()
        self._unauthenticated.discard(link)
        if link.peer_index is not None and self._followers.get(link.peer_index) is link:
            del self._followers[link.peer_index]
            self._early.pop(link.peer_index, None)
            if self._coordinator is not None:
                self._coordinator.agent_disconnected(link.peer_index)
