"""Hollow runs of many nodes in one process: real agents, coordinators, links over loopback and run
folder; workers that only have a rank, and a clock that the caller moves.

An agent takes a turn in each step, and at each moment at which it has something to read, as
`select` wakes it. A message takes a moment. What an agent does in a turn costs no simulated time,
but opening files (`open_s` each): it takes part again once they are read. Processor time, bytes and
opened files are counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from orchestrator.agent import agent as agent_module
from orchestrator.agent.agent import Agent
from orchestrator.agent.links import Link, Peer, connect
from orchestrator.agent.liveness import FAILED, FINISHED, AwakeClock, RankPosition
from orchestrator.agent.node_spec import SILENCE_S, NodeSpec, secret_of
from orchestrator.errors import RunFolderError
from orchestrator.rundir import files
from orchestrator.rundir.files import read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.generations import GenerationRecord
from orchestrator.rundir.outcome import failure_record

STEP_S, MOMENT_S = 0.1, 0.01
MOMENTS = round(STEP_S / MOMENT_S)
SEEN = asdict(RankPosition())


@dataclass(slots=True)
class HollowWorker:
    """A worker without a process. `generation`: the newest that it was sent."""

    rank: int
    incarnation: int
    events: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    status: int | None = None
    final_state: str = ""
    failure: dict[str, Any] | None = None
    generation: int = -1

    @property
    def latest_events(self) -> dict[str, dict[str, Any]]:
        return self.events


class HollowWorkers:
    """The part of `Workers` that an agent uses."""

    def __init__(self, *, report: Callable[[dict[str, Any]], None], **_: Any) -> None:
        self.report = report
        self.all: dict[int, HollowWorker] = {}

    @property
    def alive(self) -> list[HollowWorker]:
        return [worker for worker in self.all.values() if worker.status is None]

    def start(self, rank: int, incarnation: int) -> None:
        self.all[rank] = HollowWorker(rank, incarnation)
        self.report({"event": "started", "rank": rank, "incarnation": incarnation})

    def send(self, rank: int | None = None, **message: Any) -> None:
        for worker in self.all.values():
            if rank in (None, worker.rank) and "generation" in message:
                worker.generation = message["generation"]

    def say(self, rank: int, event: str, **values: Any) -> None:
        """Report an event of a worker."""
        worker = self.all[rank]
        own = {"rank": rank, "incarnation": worker.incarnation}
        worker.events[event] = {"event": event, **own, **values}
        self.report(worker.events[event])

    def end(self, rank: int, status: int, final_state: str = "") -> None:
        """End a worker and report that."""
        worker = self.all[rank]
        if worker.status is None:
            worker.status, worker.final_state = status, final_state
            if final_state == FAILED:
                worker.failure = failure_record(rank, "", "it fails", secondary=rank > 0)
            self.report(self.exit_of(worker))

    def exit_of(self, worker: HollowWorker) -> dict[str, Any]:
        return {
            "event": "exit",
            "rank": worker.rank,
            "incarnation": worker.incarnation,
            "status": worker.status,
            "final_state": worker.final_state,
            "failure": worker.failure,
            "seen": SEEN,
            "ago_s": 0.0,
        }

    def kill(self, rank: int) -> None:
        self.end(rank, -signal.SIGKILL)

    def kill_all(self, spare: Any = ()) -> None:
        del spare
        for rank in self.all:
            self.kill(rank)

    def reap(self) -> bool:
        return any(worker.status is None for worker in self.all.values())

    def stop(self, name: str) -> None: ...
    def check_programs(self) -> None: ...
    def judge(self, stopped_limit_s: float) -> None: ...
    def await_leftovers(self) -> None: ...
    def keep_positions(self, *, stacks: bool) -> None: ...

    end_all = kill_all


class HollowAgent(Agent):
    """An agent that never waits."""

    def _pause_s(self) -> float:
        return 0.0

    @property
    def workers(self) -> HollowWorkers:
        found: Any = self._workers
        return found

    @property
    def has_input(self) -> bool:
        return bool(self._selector.select(0))

    @property
    def over(self) -> bool:
        return self._over

    @property
    def coordinates(self) -> bool:
        return self._coordinator is not None

    def turn(self, now: float) -> None:
        """Take a turn; a failed one is repeated."""
        del now
        with contextlib.suppress(OSError, RunFolderError):
            self._turn()

    def delay_beat(self, seconds: float) -> None:
        """Beat at another moment than the others."""
        self._beat_at = self._clock() + seconds - 1.0

    def close(self) -> None:
        """Close everything, as the kernel does when the process ends."""
        for link in self._links():
            link.close()
        self._listener.close()
        self._selector.close()
        for end in self._pipe:
            os.close(end)


class HollowRun:
    """A run whose nodes are hollow agents.

    Args:
        open_s: simulated seconds for which an opened file keeps its agent from its next turn.
        late_s: agents connect to the next coordinator in the course of so many seconds, each at an
            attempt, which are `STEP_S` apart.

    Attributes:
        opened: files that each node's agent has opened.
        sent: bytes that each node's agent has sent to others.
        processor_s: real processor seconds of each node's agent.
    """

    def __init__(
        self,
        folder: Path,
        *,
        nodes: int,
        ranks_per_node: int,
        seed: int = 0,
        open_s: float = 0.0,
        late_s: float = 0.0,
        survive: bool = True,
    ) -> None:
        self.chance, self.now, self.current = random.Random(seed), 1000.0, 0  # noqa: S311
        self.run = RunDir(folder)
        self.run.create()
        self.run.begin_attempt()
        (folder / "logs").mkdir(exist_ok=True)
        secret_of(self.run, 0)
        self.spec = NodeSpec(
            run=folder,
            attempt=0,
            index=0,
            names=tuple(f"node{index}" for index in range(nodes)),
            ranks_per_node=ranks_per_node,
            address="127.0.0.1",
            silence_s=SILENCE_S if survive else 60.0,
            heartbeat_s=60.0,
            hang_s=1800.0,
            join_s=600.0,
            survive=survive,
            replacements=0,
        )
        self.record = GenerationRecord(self.run.attempt(0))
        self.agents: dict[int, HollowAgent] = {}
        self._controls: list[int] = []
        self._open_s, self._late_s = open_s, late_s
        self._busy_until: defaultdict[int, float] = defaultdict(float)
        self._connects_at: dict[int, float] = {}
        self._moments = 0
        self.opened, self.sent = Counter[int](), Counter[int]()
        self.processor_s: defaultdict[int, float] = defaultdict(float)

    @contextlib.contextmanager
    def __call__(self) -> Generator[HollowRun]:
        """Simulate clock, workers and files while this is open."""
        open_file, send = files.open_nofollow, Link.send_line
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

        def count_open(path: Path, *flags: int) -> int:
            self.opened[self.current] += 1
            return open_file(path, *flags)

        def count_sent(link: Link, line: bytes) -> bool:
            self.sent[self.current] += len(line)
            return send(link, line)

        with contextlib.ExitStack() as patches:
            for target, name, value in (
                (files, "open_nofollow", count_open),
                (Link, "send_line", count_sent),
                (agent_module, "connect", self._connect),
                (agent_module, "AwakeClock", lambda: AwakeClock(lambda: self.now)),
                (agent_module, "Workers", HollowWorkers),
                (agent_module, "time", SimpleNamespace(sleep=lambda _: None)),
                (os, "fsync", lambda _: None),
            ):
                patches.enter_context(mock.patch.object(target, name, value))
            try:
                yield self
            finally:
                for index in list(self.agents):
                    self.kill(index)
                for end in self._controls:
                    os.close(end)
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def _connect(self, peer: Peer, **more: Any) -> Link:
        lives = peer.node in self.agents
        if lives and self.now < self._connects_at.get(self.current, 0.0):
            raise TimeoutError
        return connect(peer, **more)

    # ------------------------------------------------------------------ time

    def start(self) -> None:
        """Start all agents."""
        for index in range(self.spec.nodes):
            self.current = index
            read, write = os.pipe()
            self._controls += [read, write]
            values = {**self.spec.to_json(), "index": index}
            agent = self.agents[index] = HollowAgent(NodeSpec.from_json(values), read)
            agent.delay_beat(self.chance.random())
            for rank in self.spec.ranks_of(index):
                agent.workers.start(rank, 0)
                agent.workers.say(rank, "begins", code={})

    def turn(self, index: int) -> None:
        """Let an agent take a turn."""
        agent, self.current = self.agents[index], index
        began, before = time.process_time(), self.opened[index]
        agent.turn(self.now)
        self.processor_s[index] += time.process_time() - began
        self._busy_until[index] = self.now + (self.opened[index] - before) * self._open_s
        if agent.over:
            self.kill(index)

    def step(self) -> None:
        """Let `STEP_S` pass, in which each agent takes a turn, in random order."""
        for _ in range(MOMENTS):
            self._pass_moment()

    def _pass_moment(self) -> None:
        """Let `MOMENT_S` pass. Agents that have something to read take a turn, or all do."""
        self.now += MOMENT_S
        self._moments += 1
        ends_step = self._moments % MOMENTS == 0
        order = list(self.agents)
        self.chance.shuffle(order)
        for index in order:
            is_free = index in self.agents and self.now >= self._busy_until[index]
            if is_free and (ends_step or self.agents[index].has_input):
                self.turn(index)

    def until(self, condition: Callable[[], Any], most_s: float) -> float:
        """Let time pass until the condition holds; return the simulated seconds.

        Raises:
            TimeoutError: it does not, for `most_s`.
        """
        began = self.now
        while not condition():
            if self.now - began > most_s:
                raise TimeoutError(f"not within {most_s:g} simulated seconds")
            self._pass_moment()
        return self.now - began

    def train(self, seconds: int) -> None:
        """Let agents send heartbeats for a while; the first node's takes a turn after each."""
        others = [index for index in self.agents if index]
        began = self.now
        for second in range(seconds):
            for number, index in enumerate(others, 1):
                self.now = began + second + number / len(others)
                self.turn(index)
                self.turn(0)

    def forget_costs(self) -> None:
        """Count from now on."""
        for counts in (self.opened, self.sent, self.processor_s):
            counts.clear()

    # ------------------------------------------------------------------ events

    def kill(self, index: int) -> None:
        """End a node: its agent, and its workers with it."""
        self.agents.pop(index).close()

    def form(self) -> float:
        """Start all agents, and step until the first generation; return the seconds."""
        self.start()
        return self.until(lambda: self.reached(0), 60.0)

    def take_over(self) -> float:
        """Kill the first node; step until the next generation; return the seconds."""
        if self._late_s:
            latest_s = self._late_s - STEP_S  # the next attempt may be so much later
            late = {i: self.now + self.chance.uniform(0, latest_s) for i in self.agents}
            self._connects_at = late
        self.kill(0)
        return self.until(lambda: self.newest["generation"] > 0, 60.0)

    def reached(self, generation: int) -> bool:
        """Return whether all live workers were sent this generation or a newer one."""
        workers = (w for agent in self.agents.values() for w in agent.workers.all.values())
        return all(w.generation >= generation for w in workers if w.status is None)

    def fail(self, rank: int) -> float:
        """Let a worker fail, and the others after it; step to the end; return the seconds."""
        self._end(rank, 1, FAILED)
        self.step()
        for other in range(self.spec.ranks):
            if other != rank:
                self._end(other, 1, FAILED)
        return self.until(lambda: not self.agents, 60.0)

    def finish(self) -> float:
        """Let all workers finish; step to the end; return the seconds."""
        for rank in range(self.spec.ranks):
            self._end(rank, 0, FINISHED)
        return self.until(lambda: not self.agents, 60.0)

    def _end(self, rank: int, status: int, final_state: str) -> None:
        index = self.spec.node_of(rank)
        if index in self.agents:
            self.current = index
            began = time.process_time()
            self.agents[index].workers.end(rank, status, final_state)
            self.processor_s[index] += time.process_time() - began

    @property
    def coordinator(self) -> int:
        """The node whose agent coordinates."""
        return next(index for index, agent in self.agents.items() if agent.coordinates)

    @property
    def newest(self) -> dict[str, Any]:
        """The newest generation, read without being counted."""
        with mock.patch.object(self, "opened", Counter[int]()):
            return self.record.newest() or {"generation": -1, "members": []}

    @property
    def outcome(self) -> Mapping[str, Any] | None:
        return read_json(self.run.outcome(0))
