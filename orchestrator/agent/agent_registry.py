"""The agents of one attempt, as the coordinator knows them: connected, silent, or lost.

| an agent is | `heard` | `connected` | `lost` | until |
|---|---|---|---|---|
| awaited | None | no | no | it connects, or has not in time: lost |
| connected | a time | yes | no | its link breaks, or it is silent for too long: lost |
| broken off | a time | no | no | it connects again, has ended, or is silent for too long: lost |
| lost | None | perhaps | yes | it connects: it was only late, or the node has another agent |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice

from orchestrator.agent.links import Peer, Port, probe_ports
from orchestrator.agent.liveness import LEAST_SILENCE_S
from orchestrator.agent.node_spec import NodeSpec, agent_file
from orchestrator.errors import RunFolderError
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import NODE_WENT_AWAY

COME_S = 2.0
"""Time for the other agents to connect to a new coordinator, or to be reached by it."""
REACH_S = 0.2
"""For agents to answer a probe, in which the coordinator does nothing else."""
PROBE_S = 1.0
"""Between two probes of the same agent: each costs a connection to it."""
MOST_PROBES = 64
"""Agents that are probed in one turn."""
MOST_READ = 4
"""Of their addresses in one turn: these are in files, on a file system that may be slow, and
connections wait to be answered. After `PROBE_S` without any, `MOST_PROBES` are read, so that most
agents that end together are found together.
"""
AGENT_GONE = f"{NODE_WENT_AWAY}its agent is gone"


@dataclass(slots=True)
class AgentState:
    """State of one node's agent; see the module.

    Attributes:
        heard: monotonic time of its last message.
        connected: its link is there.
        peer: its address, once it was read; None again once there may be another one.
        port: state of its port at the latest probe, `probed`. One that is closed stays so: another
            agent of the node has another port, and connects.
    """

    index: int
    heard: float | None = None
    connected: bool = False
    lost: bool = False
    peer: Peer | None = None
    port: Port | None = None
    probed: float = 0.0

    @property
    def is_awaited(self) -> bool:
        return self.heard is None and not self.lost

    @property
    def is_reachable(self) -> bool:
        return self.connected and not self.lost


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentLoss:
    """A decision that an agent is lost, and its workers with it.

    Attributes:
        disconnects: its link is to be closed; an agent that lives then connects again.
    """

    index: int
    cause: str = AGENT_GONE
    disconnects: bool = False


class AgentRegistry:
    """The agents of one attempt.

    Args:
        took_over: the coordinator follows another one: all agents run already.
    """

    def __init__(self, spec: NodeSpec, now: float, *, took_over: bool) -> None:
        self._spec, self._run = spec, RunDir(spec.run)
        self._began, self._took_over = now, took_over
        self._read_at = self._awaited_probed = 0.0
        self._reads_left = self._probes_left = 0  # in this turn
        self.agents = {index: AgentState(index) for index in range(spec.nodes)}

    def connect(self, index: int, now: float) -> None:
        agent = self.agents[index]
        agent.heard, agent.connected, agent.lost = now, True, False
        agent.peer = agent.port = None

    def disconnect(self, index: int) -> None:
        """Handle a broken link, perhaps of a later agent of the node, with another address."""
        self.agents[index].connected, self.agents[index].peer = False, None

    def lose(self, index: int) -> None:
        agent = self.agents[index]
        agent.lost, agent.heard, agent.peer = True, None, None

    def awaits_connections(self, now: float) -> bool:
        """Return whether agents may still connect that are only late."""
        awaited = any(agent.is_awaited for agent in self.agents.values())
        return awaited and now - self._began < COME_S

    def is_any_silent(self, now: float) -> bool:
        """Return whether an agent has missed heartbeats, and may be lost soon."""
        return any(
            not agent.lost and agent.heard is not None and now - agent.heard > LEAST_SILENCE_S
            for agent in self.agents.values()
            if agent.index != self._spec.index
        )

    def is_heard(self, index: int, now: float) -> bool:
        """Return whether this agent is connected and misses no heartbeats: what it has reported
        last of its ranks still holds.
        """
        agent = self.agents[index]
        on_time = agent.heard is not None and now - agent.heard <= LEAST_SILENCE_S
        return index == self._spec.index or (agent.connected and on_time)

    def check(self, now: float, silence_s: float, *, formed: bool) -> list[AgentLoss]:
        """Find agents that have ended, are silent, or did not connect in time.

        Once in each turn. It only finds them; the caller calls `lose`. A file with an address that
        cannot be read decides nothing.

        Args:
            silence_s: for how long an agent may be silent.
            formed: the first generation has begun.
        """
        self._probes_left = MOST_PROBES
        self._reads_left = MOST_PROBES if now - self._read_at >= PROBE_S else MOST_READ
        limit_s = max(silence_s, LEAST_SILENCE_S)
        losses = self._check_broken(now)
        closed = {loss.index for loss in losses}
        for agent in self.agents.values():
            silent = agent.heard is not None and now - agent.heard > limit_s
            if silent and agent.index != self._spec.index and agent.index not in closed:
                cause = (
                    f"{NODE_WENT_AWAY}its agent gave no sign of life for {limit_s:g} s "
                    "(cluster.heartbeat_timeout_s): it is stopped, or cut off"
                )
                losses.append(AgentLoss(index=agent.index, cause=cause, disconnects=True))
        awaited = [agent for agent in self.agents.values() if agent.is_awaited]
        # Once it has begun, all agents run, and are late by seconds; before, nodes may still start.
        if self._took_over or formed:
            losses += self._check_awaited(now, awaited, limit_s)
        elif now - self._began > self._spec.join_s:
            cause = (
                f"its agent did not connect within {self._spec.join_s:g} s "
                "(cluster.rendezvous_timeout_s)"
            )
            losses += [AgentLoss(index=agent.index, cause=cause) for agent in awaited]
        return losses

    def _check_broken(self, now: float) -> list[AgentLoss]:
        """Find agents that have ended among those whose links are broken.

        Links may break while their agents live, and these connect again. Only one behind a closed
        port has ended; silence decides on the others.
        """
        broken = [a for a in self.agents.values() if a.heard is not None and not a.connected]
        due = [agent for agent in broken if now - agent.probed >= PROBE_S]
        if due:
            self._probe(_longest_ago(due), now)
        return [AgentLoss(index=agent.index) for agent in broken if agent.port is Port.CLOSED]

    def _check_awaited(
        self, now: float, awaited: list[AgentState], limit_s: float
    ) -> list[AgentLoss]:
        """Find agents that do not connect to this coordinator, which has taken over.

        One whose port is open lives, and may be late because many others connect as well. It has
        the time in which a connected one may be silent.
        """
        asked = _longest_ago(awaited)
        self._read_addresses(asked, now)
        known = any(agent.peer is not None for agent in asked)
        if known and now - self._awaited_probed >= PROBE_S:
            self._awaited_probed = now
            self._probe(asked, now)
        waited_s = now - self._began
        losses: list[AgentLoss] = []
        for agent in awaited:
            silent = waited_s > COME_S and agent.port is Port.SILENT
            if agent.port is Port.CLOSED or silent or waited_s > COME_S + limit_s:
                losses.append(AgentLoss(index=agent.index))
        return losses

    # ------------------------------------------------------------------ ports

    def ports(self, nodes: Iterable[int], now: float, since: float) -> dict[int, Port]:
        """Return the states of the ports of these nodes' agents at probes since a moment. Those of
        which none is known yet are probed, as many as this turn allows; the others are left out.
        """
        agents = [self.agents[index] for index in nodes]
        unknown = [agent for agent in agents if agent.port is None or agent.probed < since]
        if unknown:
            self._probe(_longest_ago(unknown), now)
        return {
            agent.index: agent.port
            for agent in agents
            if agent.probed >= since and agent.port is not None
        }

    def _probe(self, agents: Iterable[AgentState], now: float) -> None:
        """Learn the states of these agents' ports, of as many as this turn allows."""
        agents = list(agents)
        self._read_addresses(agents, now)
        known = {agent.index: agent.peer for agent in agents if agent.peer is not None}
        peers = dict(islice(known.items(), self._probes_left))
        self._probes_left -= len(peers)
        if peers:  # a probe may take `REACH_S`
            for index, port in probe_ports(peers, REACH_S).items():
                self.agents[index].probed, self.agents[index].port = now, port

    def _read_addresses(self, agents: Iterable[AgentState], now: float) -> None:
        """Read the addresses that are not known yet, of as many agents as this turn allows."""
        unread = (agent for agent in agents if agent.peer is None)
        for agent in islice(unread, self._reads_left):
            self._reads_left, self._read_at = self._reads_left - 1, now
            try:
                agent.peer = agent_file(self._run, self._spec.attempt, agent.index)
            except (OSError, RunFolderError):  # it is read again; until then silence decides
                agent.probed = now
                # An open port may have closed since the probe that found it.
                agent.port = agent.port if agent.port is Port.CLOSED else None
                continue
            if agent.peer is None:  # nothing that could be probed
                agent.probed, agent.port = now, Port.SILENT


def _longest_ago(agents: Iterable[AgentState]) -> list[AgentState]:
    """Return the agents whose latest probes are the oldest, as many as one turn allows."""
    return nsmallest(MOST_PROBES, agents, key=lambda agent: (agent.probed, agent.index))
