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

from orchestrator.agent.links import Peer, Port, probe_ports
from orchestrator.agent.liveness import BEAT_S
from orchestrator.agent.node_spec import NodeSpec, agent_file
from orchestrator.agent.root_cause import NODE_WENT_AWAY
from orchestrator.rundir.folder import RunDir

COME_S = 2.0
"""Time for the other agents to connect to a new coordinator, or to be reached by it."""
REACH_S = 0.2
"""For agents to answer a probe, in which the coordinator does nothing else."""
PROBE_S = 1.0
"""Between two probes of agents that have not connected: each costs a connection to each of them."""
MOST_PROBES = 64
"""Agents that are probed together: their addresses are in files, on a file system that is slow."""
MOST_READ = 4
"""Of these files in one turn, but the first, so that connections that wait are soon answered."""
LEAST_SILENCE_S = 2.5 * BEAT_S
"""A live agent, which sends a heartbeat every `BEAT_S`, may be as late as this."""
AGENT_GONE = f"{NODE_WENT_AWAY}its agent is gone"


@dataclass(slots=True)
class AgentState:
    """State of one node's agent; see the module.

    Attributes:
        heard: monotonic time of its last message.
        connected: its link is there.
        peer: its address, once it was read.
        port: state of its port at the latest probe, `probed`.
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
        self._probed = 0.0
        self.agents = {index: AgentState(index) for index in range(spec.nodes)}

    def connect(self, index: int, now: float) -> None:
        agent = self.agents[index]
        agent.heard, agent.connected, agent.lost = now, True, False

    def lose(self, index: int) -> None:
        agent = self.agents[index]
        agent.lost, agent.heard = True, None

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

    def check(self, now: float, silence_s: float, *, formed: bool) -> list[AgentLoss]:
        """Find agents that have ended, are silent, or did not connect in time.

        It only finds them: reading files may fail, and must not hide a loss from the caller, who
        calls `lose`.

        Args:
            silence_s: for how long an agent may be silent.
            formed: the first generation has begun.
        """
        limit_s = max(silence_s, LEAST_SILENCE_S)
        # Links may break while their agents live, and these connect again. Only one behind a closed
        # port has ended; silence decides on the others.
        broken = [
            agent
            for agent in self.agents.values()
            if agent.heard is not None and not agent.connected and now - agent.probed >= PROBE_S
        ][:MOST_PROBES]
        for agent in broken:
            agent.probed = now
        closed = self.closed_ports(agent.index for agent in broken)
        losses = [AgentLoss(index=index) for index in closed]
        awaited = [agent for agent in self.agents.values() if agent.is_awaited]
        for agent in self.agents.values():
            silent = agent.heard is not None and now - agent.heard > limit_s
            if silent and agent.index != self._spec.index and agent.index not in closed:
                cause = (
                    f"{NODE_WENT_AWAY}its agent gave no sign of life for {limit_s:g} s "
                    "(cluster.heartbeat_timeout_s): it is stopped, or cut off"
                )
                losses.append(AgentLoss(index=agent.index, cause=cause, disconnects=True))
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

    def _check_awaited(
        self, now: float, awaited: list[AgentState], limit_s: float
    ) -> list[AgentLoss]:
        """Find agents that do not connect to this coordinator, which has taken over.

        One whose port is open lives, and may be late because many others connect as well. It has
        the time in which a connected one may be silent.
        """
        asked = nsmallest(MOST_PROBES, awaited, key=lambda agent: (agent.probed, agent.index))
        unread = [agent for agent in asked if agent.peer is None]
        for agent in unread[: MOST_READ if self._probed else MOST_PROBES]:
            agent.peer = agent_file(self._run, self._spec.attempt, agent.index)
            if agent.peer is None:
                agent.probed, agent.port = now, Port.SILENT
        known = {agent.index: agent.peer for agent in asked if agent.peer is not None}
        if known and now - self._probed >= PROBE_S:
            self._probed = now
            for index, port in probe_ports(known, REACH_S).items():
                self.agents[index].probed, self.agents[index].port = now, port
        waited_s = now - self._began
        losses: list[AgentLoss] = []
        for agent in awaited:
            silent = waited_s > COME_S and agent.port is Port.SILENT
            if agent.port is Port.CLOSED or silent or waited_s > COME_S + limit_s:
                losses.append(AgentLoss(index=agent.index))
        return losses

    def probe(self, nodes: Iterable[int]) -> dict[int, Port]:
        """Return the states of the ports of these nodes' agents that have published an address."""
        known = {n: agent_file(self._run, self._spec.attempt, n) for n in nodes}
        return probe_ports({n: peer for n, peer in known.items() if peer}, REACH_S)

    def closed_ports(self, nodes: Iterable[int]) -> set[int]:
        """Return those of these nodes at whose agent's address nothing listens any more."""
        return {index for index, port in self.probe(nodes).items() if port is Port.CLOSED}
