"""Real agents of one run in one process, with simulated workers, network and clock.

Agents, coordinators, their links over loopback and the run folder are the product's own. A turn of
each agent, in random order, is one step of `STEP_S`. All that is random follows from a seed.
"""

import contextlib
import errno
import math
import os
import random
import signal
from collections import deque
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace

from orchestrator.agent import agent as agent_module
from orchestrator.agent import agent_registry
from orchestrator.agent.agent import Agent
from orchestrator.agent.links import Link, Port, connect, probe_ports
from orchestrator.agent.liveness import (
    EVICTED,
    FAILED,
    FINISHED,
    STOPPED,
    AwakeClock,
    RankPosition,
)
from orchestrator.agent.node_spec import secret_of
from orchestrator.errors import RunFolderError
from orchestrator.rundir import files, generations
from orchestrator.rundir.files import read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.generations import GenerationRecord, member_of, members_of
from orchestrator.rundir.outcome import failure_record
from orchestrator.trainer.survival import MARGIN_S
from tests.agent.specs import node_spec

STEP_S = 0.1
AGENT_REST_S = 0.3
SEEN = asdict(RankPosition())
IMPORTS, WAITS, JOINS, FORMS, TRAINS, READY, ENDS = (
    "imports",
    "waits",
    "joins",
    "forms",
    "trains",
    "is ready for newcomers",
    "is at the end",
)


@dataclass(eq=False)
class Process:
    """A simulated worker: what `trainer/survival.py` does, without computing.

    Attributes:
        since: when it entered its state, or noticed a loss in it.
        outbox: events that its agent has not read.
    """

    rank: int
    incarnation: int
    ready_at: float
    state: str = IMPORTS
    since: float = 0.0
    generation: int = -1
    updates: int = 0
    latest: dict = field(default_factory=lambda: {"generation": -1, "members": []})
    left: bool = False
    newcomers: bool = False
    stop: str = ""
    lost_at: float | None = None
    frozen_at: float | None = None
    leave_at: float | None = None
    outbox: list = field(default_factory=list)
    # As its agent sees it:
    latest_events: dict = field(default_factory=dict)
    status: int | None = None
    reported: bool = False
    final_state: str = ""
    failure: dict | None = None

    def receive(self, message):
        if message.get("generation", -1) > self.latest["generation"]:
            self.latest, self.newcomers = {**message, "members": members_of(message)}, False
        self.left = self.left or message.get("left", False)
        self.newcomers = message.get("newcomers", self.newcomers)
        self.stop = message.get("stop", self.stop)
        if "delayed" in message:
            self.lost_at = None


class SimulatedWorkers:
    """The part of `Workers` that an agent uses."""

    def __init__(self, *, spec, selector, report, clock, on_fork):
        del spec, selector, clock, on_fork
        self.report = report
        self.simulation = None  # set by it
        self.all = {}
        self.stops = []

    @property
    def alive(self):
        return [one for one in self.all.values() if not one.reported]

    def start(self, rank, incarnation):
        before = self.all.get(rank)
        if before is not None and not before.reported:
            return
        self.all[rank] = one = self.simulation.new_process(rank, incarnation)
        self.report({"event": "started", "rank": rank, "incarnation": incarnation})
        for name in self.stops:
            one.receive({"stop": name})

    def send(self, rank=None, **message):
        for one in self.alive:
            if rank in (None, one.rank) and one.status is None:
                one.receive(message)

    def stop(self, name):
        self.stops.append(name)
        self.send(stop=name)

    def kill(self, rank):
        if rank in self.all:
            self.simulation.kill(self.all[rank])

    def kill_all(self, spare=()):
        del spare
        for rank in self.all:
            self.kill(rank)

    def check_programs(self):
        """Here only: read what the workers have sent."""
        for one in self.alive:
            for event in one.outbox:
                event |= {"rank": one.rank, "incarnation": one.incarnation}
                one.latest_events[event["event"]] = event
                self.report(event)
            one.outbox.clear()

    def reap(self):
        self.check_programs()
        for one in self.alive:
            if one.status is not None:
                one.reported = True
                self.report(self.exit_of(one))
        return bool(self.alive)

    def exit_of(self, one):
        return {
            "event": "exit",
            "rank": one.rank,
            "incarnation": one.incarnation,
            "status": one.status,
            "final_state": one.final_state,
            "failure": one.failure,
            "seen": SEEN,
            "ago_s": 0.0,
        }

    def judge(self, stopped_limit_s):
        for one in self.alive:
            if one.frozen_at is not None and one.status is None:
                seconds = self.simulation.now - one.frozen_at
                self.report(
                    {"event": "stopped", "rank": one.rank, "seconds": seconds, "seen": SEEN}
                )

    def keep_positions(self, *, stacks):
        pass

    def await_leftovers(self):
        pass

    end_all = kill_all


class SimulatedAgent(Agent):
    """An agent that never waits, and whose links obey the simulated network."""

    def _pause_s(self):
        return 0.0

    def _hear_coordinator(self):
        link = self._coordinator_link
        if link is not None and not self.network.is_cut(self._spec.index, link.peer_index):
            super()._hear_coordinator()

    def _hear_follower(self, link):
        if not self.network.is_cut(self._spec.index, link.peer_index):
            super()._hear_follower(link)


class Network:
    """Delays messages between agents, each link in order, and cuts nodes off from each other."""

    def __init__(self, chance, monkeypatch):
        self.chance, self.current = chance, -1
        self.cuts = set()
        self.delayed = {}  # link -> (sender, messages)
        self._send, self._close = Link.send_line, Link.close
        monkeypatch.setattr(Link, "send_line", lambda link, line: self.send(link, line))  # noqa: PLW0108  # binds
        monkeypatch.setattr(Link, "close", lambda link: self.close(link))  # noqa: PLW0108  # binds
        monkeypatch.setattr(agent_module, "connect", self.connect)
        for module in (agent_module, agent_registry):
            monkeypatch.setattr(module, "probe_ports", self.probe_ports)

    def is_cut(self, one, other):
        return frozenset((one, other)) in self.cuts

    def connect(self, peer, **more):
        if self.is_cut(self.current, peer.node):
            raise TimeoutError
        return connect(peer, **more)

    def probe_ports(self, peers, timeout_s):
        states = probe_ports(peers, timeout_s)
        cut = [key for key, peer in peers.items() if self.is_cut(self.current, peer.node)]
        return states | dict.fromkeys(cut, Port.SILENT)

    def send(self, link, line):
        if link.socket.fileno() < 0:
            return False
        self.delayed.setdefault(link, (self.current, deque()))[1].append(line)
        return True

    def deliver(self):
        for link in list(self.delayed):
            sender, messages = self.delayed[link]
            if self.is_cut(sender, link.peer_index) or self.chance.random() < 0.3:
                continue
            self._flush(link, self.chance.randint(1, 1 + len(messages)))

    def _flush(self, link, count):
        messages = self.delayed[link][1]
        for _ in range(min(count, len(messages))):
            self._send(link, messages.popleft())
        if not messages:
            del self.delayed[link]

    def close(self, link):
        """The kernel sends what was accepted before, unless it cannot."""
        if link in self.delayed:
            sender, messages = self.delayed[link]
            if link.socket.fileno() >= 0 and not self.is_cut(sender, link.peer_index):
                self._flush(link, len(messages))
            self.delayed.pop(link, None)
        self._close(link)

    def reset(self, link):
        """Break a link: what was under way is lost."""
        self.delayed.pop(link, None)
        with contextlib.suppress(OSError):
            link.socket.shutdown(2)


class Simulation:
    """A run with random faults."""

    def __init__(self, folder, seed, monkeypatch, **spec):
        self.chance = random.Random(seed)
        self.now, self.log = 1000.0, []
        self.run = RunDir(folder)
        self.run.create()
        self.run.begin_attempt()
        secret_of(self.run, 0)
        (folder / "logs").mkdir(exist_ok=True)
        self.network = Network(self.chance, monkeypatch)
        monkeypatch.setattr(agent_module, "AwakeClock", lambda: AwakeClock(lambda: self.now))
        monkeypatch.setattr(agent_module, "Workers", SimulatedWorkers)
        monkeypatch.setattr(agent_module, "time", SimpleNamespace(sleep=lambda _: None))
        monkeypatch.setattr(os, "fsync", lambda _: None)
        self.specs = [node_spec(folder, index=i, **spec) for i in range(spec["nodes"])]
        self.spec = self.specs[0]
        self.record = GenerationRecord(self.run.attempt(0))
        self.agents, self.frozen, self.starts = {}, {}, {}
        self.controls = []
        self.left = [self.spec.replacements] * self.spec.nodes
        self.processes = []
        self.computed = {}  # generation -> (updates, with newcomers, with a stop)
        self.total = math.inf
        self.stopped = False
        self.were_members = set()
        self.full = self.unwritten = False  # the disk; an outcome
        self.all_members_lost = self.all_agents_lost = False
        self.were_cut = set()
        self.later = []  # (time, what to do then)
        write = files.write_atomically

        def write_if_room(path, content):
            if self.full and not path.name.startswith("agent-"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(path, content)

        monkeypatch.setattr(generations, "write_atomically", write_if_room)
        monkeypatch.setattr(files, "write_atomically", write_if_room)
        for index in range(self.spec.nodes):
            self.starts[index] = self.now + self.chance.uniform(0, 3)

    def say(self, sentence):
        self.log.append(f"{self.now - 1000:6.1f} {sentence}")

    # ------------------------------------------------------------------ agents

    def start_agent(self, index):
        self.network.current = index
        read, write = os.pipe()
        self.controls += [read, write]
        agent = SimulatedAgent(self.specs[index], read)
        agent.network, agent._workers.simulation = self.network, self
        self.agents[index] = agent
        agent._beat_at = agent._clock()
        if not self.specs[index].incarnation:
            for rank in self.spec.ranks_of(index):
                agent._workers.start(rank, 0)

    def turn(self, index):
        agent = self.agents[index]
        self.network.current = index
        with contextlib.suppress(OSError, RunFolderError):
            agent._turn()
        if agent._over:
            self.say(f"agent {index} ends")
            self.unwritten |= agent._coordinator is not None and self.full
            self.end_agent(index, again=agent._again)

    def end_agent(self, index, *, killed=False, again=False):
        agent = self.agents.pop(index)
        self.frozen.pop(index, None)
        self.network.current = index
        for link in agent._links():
            if killed:
                link.socket.close() if self.chance.random() < 0.5 else link.close()
            else:
                link.close()
        agent._listener.close()
        agent._selector.close()
        for end in agent._pipe:
            os.close(end)
        agent._workers.kill_all()
        self.all_agents_lost |= not self.agents and killed
        if (killed or again) and self.left[index] > 0 and not self.stopped:
            self.left[index] -= 1
            self.specs[index] = self.specs[index].next_incarnation()
            self.starts[index] = self.now + AGENT_REST_S

    # ------------------------------------------------------------------ workers

    def new_process(self, rank, incarnation):
        one = Process(rank, incarnation, self.now + self.chance.uniform(0.2, 3))
        assert all(p.status is not None for p in self.processes if p.rank == rank), (
            f"two processes of rank {rank}"
        )
        # No agent knows a process that was killed with its agent before it joined.
        assert member_of(rank, incarnation, self.spec.ranks) not in self.were_members
        self.say(f"process {incarnation} of rank {rank} starts")
        self.processes.append(one)
        return one

    def live(self):
        return [one for one in self.processes if one.status is None]

    def member(self, one):
        return member_of(one.rank, one.incarnation, self.spec.ranks)

    def end(self, one, status, final_state="", cause=None):
        one.status, one.final_state = status, final_state
        if cause is not None:
            name = self.spec.name_of(self.spec.node_of(one.rank))
            one.failure = failure_record(one.rank, name, cause, secondary=True)
        how = f"{final_state or status} {cause or ''}"
        self.say(f"process {one.incarnation} of rank {one.rank} ends: {how}")

    def kill(self, one):
        if one.status is None:
            self.end(one, -signal.SIGKILL)

    def enter(self, one, state):
        one.state, one.since, one.lost_at = state, self.now, None

    def step_worker(self, one):
        newer = one.latest["generation"] > one.generation
        if one.state == IMPORTS:
            if self.now < one.ready_at:
                return
            if one.incarnation:
                one.outbox.append({"event": "joins"})
                self.enter(one, JOINS)
            else:
                one.outbox.append({"event": "begins", "code": {}})
                self.enter(one, WAITS)
        elif one.state == WAITS:
            if newer:
                one.generation = 0
                one.outbox.append({"event": "trains"})
                self.enter(one, TRAINS)
        elif one.state == JOINS:
            if self.member(one) in one.latest["members"]:
                one.outbox.append({"event": "trains"})
                self.follow(one)
            elif one.left or one.stop:
                self.end(one, 75, EVICTED)
        elif one.state == ENDS and one.leave_at is not None:
            if self.now >= one.leave_at:
                self.end(one, 0, FINISHED)
        elif newer:
            self.follow(one)
        elif one.state == TRAINS:
            self.train(one)
        if one.state in (TRAINS, ENDS, FORMS, READY) and one.status is None:
            self.notice_losses(one)

    def follow(self, one):
        one.generation = one.latest["generation"]
        if self.member(one) not in one.latest["members"]:
            self.end(one, 75, EVICTED)
        else:
            self.enter(one, FORMS)

    def notice_losses(self, one):
        """End a worker that has lost a peer, and to which no generation came for a while."""
        if one.leave_at is not None:
            return
        members = set(self.members_of(one.generation))
        there = {self.member(p) for p in self.live()}
        if one.state == READY and not one.left:
            return
        if one.state == FORMS and self.now - one.since <= self.spec.join_s:
            return
        leads = self.member(one) == self.members_of(one.generation)[0]
        overtaken = leads and self.record.read(one.generation + 1) is not None  # as `before_record`
        if one.state in (TRAINS, ENDS) and members <= there and not overtaken:
            one.lost_at = None
            return
        if one.lost_at is None:
            one.lost_at = self.now
        if self.now - one.lost_at > self.spec.silence_s + MARGIN_S or one.left:
            self.end(one, 1, FAILED, "a peer is lost, and no generation came")

    def members_of(self, generation):
        if generation == 0:
            return list(range(self.spec.ranks))
        return self.record.read(generation)["members"]

    def train(self, one):
        """Complete the boundary that has been computed, if there is one."""
        updates, newcomers, stop = self.computed.get(one.generation, (-1, False, False))
        if one.updates >= updates or self.chance.random() < 0.5:
            return
        one.updates = updates
        if stop:
            self.end(one, 0, STOPPED)
        elif updates >= self.total:
            self.enter(one, ENDS)
        elif newcomers:
            one.outbox.append({"event": "ready", "generation": one.generation, "updates": updates})
            self.enter(one, READY)

    def step_groups(self):
        """Form groups, and compute boundaries, of which all members are at the same position."""
        working = [one for one in self.live() if one.frozen_at is None]
        for number in {one.generation for one in working if one.generation >= 0}:
            members = self.members_of(number)
            group = [one for one in working if one.generation == number]
            if {self.member(one) for one in group} != set(members):
                continue
            states = {one.state for one in group}
            if states == {FORMS}:
                updates = max(one.updates for one in group)
                for one in group:
                    one.updates = updates
                    self.enter(one, TRAINS if updates < self.total else ENDS)
            elif states == {TRAINS} and self.chance.random() < 0.5:
                updates = {one.updates for one in group}
                if len(updates) == 1:
                    leader = next(one for one in group if self.member(one) == members[0])
                    [done] = updates
                    stop = any(one.stop for one in group)
                    newcomers = leader.newcomers and done + 1 < self.total
                    self.computed[number] = (done + 1, newcomers, stop)
            elif states == {ENDS}:
                for one in group:
                    one.leave_at = one.leave_at or self.now + self.chance.uniform(0, 1)

    # ------------------------------------------------------------------ time

    def step(self):
        self.now += STEP_S
        for index in [index for index, at in self.starts.items() if self.now >= at]:
            del self.starts[index]
            self.say(f"agent {index} starts")
            self.start_agent(index)
        self.network.deliver()
        live = self.live()
        self.chance.shuffle(live)
        for one in live:
            if one.frozen_at is None and one.status is None:
                self.step_worker(one)
        self.step_groups()
        order = list(self.agents)
        self.chance.shuffle(order)
        for index in order:
            if index in self.agents and index not in self.frozen:
                self.turn(index)
        for index in [index for index, until in self.frozen.items() if self.now >= until]:
            del self.frozen[index]
        for due in [due for due in self.later if self.now >= due[0]]:
            self.later.remove(due)
            due[1]()
        members = set(self.newest()["members"])
        self.were_members |= members
        if members and all(one.state != ENDS for one in self.processes):
            self.all_members_lost |= members.isdisjoint(map(self.member, self.live()))

    def newest(self):
        return self.record.newest() or {"generation": -1, "members": []}

    @property
    def outcome(self):
        return read_json(self.run.outcome(0))

    # ------------------------------------------------------------------ faults

    def after(self, least_s, most_s, act):
        self.later.append((self.now + self.chance.uniform(least_s, most_s), act))

    def fault(self):
        """Inject a fault that is possible now."""
        kinds = [self.kill_worker] * 3 + [
            self.freeze_worker,
            self.kill_agent,
            self.freeze_agent,
            self.cut,
            self.break_link,
            self.fill_disk,
        ]
        self.chance.choice(kinds)()

    def kill_worker(self):
        if live := self.live():
            one = self.chance.choice(live)
            self.say(f"kill rank {one.rank}")
            self.kill(one)

    def freeze_worker(self):
        if live := self.live():
            one = self.chance.choice(live)
            self.say(f"freeze rank {one.rank}")
            one.frozen_at = self.now
            self.after(0.5, 8, lambda: setattr(one, "frozen_at", None))

    def kill_agent(self):
        if self.agents:
            index = self.chance.choice(list(self.agents))
            self.say(f"kill agent {index}")
            self.end_agent(index, killed=True)

    def freeze_agent(self):
        if self.agents and not self.frozen:  # two may lose sight of each other, as if cut off
            index, seconds = self.chance.choice(list(self.agents)), self.chance.uniform(0.5, 9)
            self.say(f"freeze agent {index} for {seconds:.1f} s")
            self.frozen[index] = self.now + seconds

    def cut(self):
        pair = frozenset(self.chance.sample(range(self.spec.nodes), 2))
        self.say(f"cut nodes {sorted(pair)} off from each other")
        self.network.cuts.add(pair)
        self.were_cut |= pair
        self.after(0.5, 9, lambda: self.network.cuts.discard(pair))

    def break_link(self):
        """Break a link over which both have heard something, so that they know each other."""
        links = [
            link
            for agent in self.agents.values()
            for index, link in agent._followers.items()
            if index in self.agents and self.agents[index]._was_heard
        ]
        if links:
            link = self.chance.choice(links)
            self.say(f"break a link with node {link.peer_index}")
            self.network.reset(link)

    def fill_disk(self):
        self.say("no space on the disk")
        self.full = True
        self.after(0.5, 30, lambda: setattr(self, "full", False))

    def stop(self):
        self.say("stop")
        self.stopped = True
        for agent in self.agents.values():
            agent._workers.stop("SIGTERM")

    # ------------------------------------------------------------------ the end

    def never_back(self):
        """Return ranks that could be members again, are not, and of which no warning says why."""
        if not self.spec.replacements or not self.agents:
            return []
        there = {member % self.spec.ranks for member in self.newest()["members"]}
        found = []
        for rank in set(range(self.spec.ranks)) - there:
            node = self.spec.node_of(rank)
            # A stopped agent that the others left behind is started again, like a killed one.
            if node not in self.were_cut and (node in self.agents or self.left[node] > 0):
                warnings = self.run.warnings(0, node)
                if not warnings.exists() or "not started again" not in warnings.read_text():
                    found.append(rank)
        return found

    def close(self):
        for index in list(self.agents):
            self.end_agent(index)
        for end in self.controls:
            os.close(end)
