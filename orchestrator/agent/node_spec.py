"""One node of an attempt as its agent sees it, and the files by which agents find each other."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from orchestrator.agent.judge import Limits
from orchestrator.agent.links import Peer
from orchestrator.config.schema import Config
from orchestrator.rundir.files import create_once, read_json, write_json
from orchestrator.rundir.folder import RunDir

SILENCE_S = 5.0
"""After which an agent or a stopped worker is lost, where the others continue without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpec:
    """Parameters of one node's agent.

    Attributes:
        index, names: this node's number, and the names of all nodes.
        address: of this node, which the other nodes reach.
        incarnation: how many agents this node had before in this attempt.
        silence_s: for how long an agent or a stopped worker may be silent if the others would
            continue without it.
        heartbeat_s: the same if the run would fail (`cluster.heartbeat_timeout_s`).
        hang_s: after which a worker of which nothing moves has failed (`cluster.hang_timeout_s`).
        join_s: for how long agents wait for each other at the start.
        collective_s: after which a worker that computes while others wait for it has failed
            (`cluster.collective_timeout_s`); None: never.
        replacements: how many processes may be restarted.
        whole_nodes: the ranks of a node hold one copy of the model together, so they are lost, and
            come back, together.
        cpus_per_rank: CPUs that each worker is bound to; 0: workers are not bound.
    """

    run: Path
    attempt: int
    index: int
    names: tuple[str, ...]
    ranks_per_node: int
    address: str
    silence_s: float
    heartbeat_s: float
    hang_s: float
    join_s: float
    survive: bool
    replacements: int
    collective_s: float | None = None
    whole_nodes: bool = False
    incarnation: int = 0
    cpus_per_rank: int = 0

    @classmethod
    def of(
        cls,
        config: Config,
        run: Path,
        attempt: int,
        *,
        survive: bool,
        bind: bool = True,
        **node: Any,
    ) -> NodeSpec:
        """Return the spec of a node of a run.

        Args:
            survive: the others continue without a lost worker; see `planned_survival`.
            bind: workers may be bound to CPUs, since no other node of the run is on this machine.
            node: `index`, `names`, `address`, and perhaps `incarnation`.
        """
        cluster = config.cluster
        heartbeat_s = cluster.heartbeat_timeout_s
        return cls(
            run=run,
            attempt=attempt,
            ranks_per_node=cluster.ranks_per_node,
            silence_s=min(heartbeat_s, SILENCE_S) if survive else heartbeat_s,
            heartbeat_s=heartbeat_s,
            hang_s=cluster.hang_timeout_s,
            join_s=cluster.rendezvous_timeout_s,
            survive=survive,
            replacements=config.run.max_replacements if survive else 0,
            collective_s=cluster.collective_timeout_s,
            whole_nodes=config.engine.shard_model == "node",
            cpus_per_rank=cluster.cpus_per_rank if bind else 0,
            **node,
        )

    @property
    def limits(self) -> Limits:
        """Return the times by which each worker is judged."""
        return Limits.of(
            heartbeat_s=self.heartbeat_s,
            hang_s=self.hang_s,
            join_s=self.join_s,
            collective_s=self.collective_s,
        )

    @property
    def nodes(self) -> int:
        return len(self.names)

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def name(self) -> str:
        return self.names[self.index]

    def name_of(self, index: int) -> str:
        return self.names[index]

    def log_of(self, index: int) -> Path:
        """Return the path of a node's log, for its agent and its workers' early output."""
        return RunDir(self.run).node_log(f"node{index}")

    def ranks_of(self, index: int) -> range:
        return range(index * self.ranks_per_node, (index + 1) * self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def failure_unit(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that are lost, and come back, together with this one."""
        if not self.whole_nodes:
            return (rank,)
        return tuple(self.ranks_of(self.node_of(rank)))

    def next_incarnation(self) -> NodeSpec:
        """Return the spec of the agent that replaces this one."""
        return replace(self, incarnation=self.incarnation + 1)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "run": str(self.run)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> NodeSpec:
        known: dict[str, Any] = {field.name: record[field.name] for field in fields(cls)}
        known |= {"run": Path(record["run"]), "names": tuple(record["names"])}
        return cls(**known)


def _path(run: RunDir, attempt: int, index: int) -> Path:
    return run.attempt(attempt) / f"agent-{index:05d}.json"


def publish_agent(spec: NodeSpec, port: int) -> Peer:
    """Write where this agent listens; return it."""
    peer = Peer(spec.address, port, spec.index, spec.incarnation)
    write_json(_path(RunDir(spec.run), spec.attempt, spec.index), asdict(peer))
    return peer


def agent_file(run: RunDir, attempt: int, index: int) -> Peer | None:
    """Return what an agent has published; None before it has."""
    record = read_json(_path(run, attempt, index))
    return None if record is None else Peer(**record)


def published_agents(run: RunDir, attempt: int) -> list[Peer]:
    """Return what agents of an attempt have published; some nodes may have none yet."""
    records = map(read_json, run.attempt(attempt).glob("agent-*.json"))
    return [Peer(**record) for record in records if record is not None]


def _ends_path(run: RunDir, attempt: int, index: int) -> Path:
    return run.attempt(attempt) / f"ends-{index:05d}.json"


def record_ends(spec: NodeSpec, exits: list[dict[str, Any]]) -> None:
    """Write the exit events of this node's workers, all of which have ended in order."""
    write_json(_ends_path(RunDir(spec.run), spec.attempt, spec.index), {"exits": exits})


def recorded_ends(run: RunDir, attempt: int, index: int) -> list[dict[str, Any]]:
    """Return the exit events that a node's agent has recorded; [] before it has."""
    record = read_json(_ends_path(run, attempt, index))
    return [] if record is None else record["exits"]


def secret_of(run: RunDir, attempt: int) -> str:
    """Return the secret that authenticates an attempt's agents; the first caller creates it."""
    path = run.attempt(attempt) / "agents-secret"
    if not path.exists():
        create_once(path, secrets.token_hex(16))
    return path.read_text(encoding="ascii")
