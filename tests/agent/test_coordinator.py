"""Decisions of the coordinator, from events and a clock that the test sets; no processes."""

import shutil
import weakref
from dataclasses import asdict

import pytest

from orchestrator.agent.agent_registry import (
    AGENT_GONE,
    COME_S,
    MOST_PROBES,
    MOST_READ,
    AgentRegistry,
)
from orchestrator.agent.coordinator import (
    KILL_S,
    LOSS_WAIT_S,
    Coordinator,
)
from orchestrator.agent.links import Port
from orchestrator.agent.liveness import LEAST_SILENCE_S, RankPosition
from orchestrator.agent.node_spec import publish_agent
from orchestrator.agent.replacements import MOST_FRUITLESS, REST_S
from orchestrator.agent.root_cause import NO_EXIT_REPORT, NOT_JOINED
from orchestrator.agent.saver_election import GRACE_S
from orchestrator.agent.stacks import STACK_S
from orchestrator.engine.common.rendezvous import keep_port, listen
from orchestrator.errors import RunFolderError, describe_status
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import MISSING_FOLDER_CHECKS, RunDir
from orchestrator.rundir.generations import GenerationRecord
from orchestrator.rundir.metrics import ProgressWriter
from orchestrator.rundir.outcome import NODE_WENT_AWAY, failure_record
from tests.agent.simulation import ENDS, Simulation
from tests.agent.specs import node_spec
from tests.refusals import mentions

MOMENT_S = 2 * LOSS_WAIT_S
SEEN = asdict(RankPosition())
AWAKE = {"asleep": False, "silent": False}


class Attempt:
    """A coordinator with its agents, which obey nothing: their answers are the test's."""

    def __init__(self, folder, *, gone=(), begin=True, **more):
        self.run, self.now = RunDir(folder), 100.0
        self.spec = node_spec(folder, **more)
        self.run.attempt(self.spec.attempt).mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        self.record = GenerationRecord(self.run.attempt(self.spec.attempt))
        self.coordinator = Coordinator(self.spec, gone, lambda: self.now)
        self.commands = []
        if begin:
            for index in range(self.spec.nodes):
                if index not in gone:
                    self.join(index)
            for rank in range(self.spec.ranks):
                self.take("begins", rank, code={"job": "abc"})
            self.tick()

    def join(self, index):
        """Connect an agent that has started its workers."""
        workers = [
            {"rank": r, "events": [{"event": "started", "rank": r, "incarnation": 0}]}
            for r in self.spec.ranks_of(index)
        ]
        self.coordinator.agent_connected(index, workers)

    def take(self, event, rank, incarnation=0, **values):
        message = {"event": event, "rank": rank, "incarnation": incarnation, **values}
        self.coordinator.handle_event(self.spec.node_of(rank), message)

    def end(self, rank, status=0, final_state="", incarnation=0, failure=None):
        ended = {"status": status, "final_state": final_state, "failure": failure}
        self.take("exit", rank, incarnation, **ended, seen=SEEN, ago_s=0.0)

    def tick(self, seconds=0.0):
        """Let time pass; every agent that lives sends heartbeats."""
        self.now += seconds
        for agent in self.coordinator.agents.values():
            if agent.connected:
                self.coordinator.heard(agent.index)
        self.coordinator.tick()
        self.commands += self.coordinator.commands()

    def lose_agent(self, index, port=None):
        """Break an agent's link; nothing listens at its port any more, unless one is given."""
        if port is None:
            # Kept, or else a test that runs meanwhile could listen there.
            keeper = keep_port("127.0.0.1")
            weakref.finalize(self, keeper.close)
            port = keeper.getsockname()[1]
        publish_agent(node_spec(self.run.path, index=index), port)
        self.coordinator.agent_disconnected(index)

    def commands_of(self, command):
        """Take the commands of one kind."""
        found = [(a, c) for a, c in self.commands if c["command"] == command]
        self.commands = [one for one in self.commands if one not in found]
        return found

    @property
    def outcome(self):
        return read_json(self.run.outcome(0))

    @property
    def newest(self):
        return self.record.newest()


@pytest.fixture
def attempt(tmp_path):
    return Attempt(tmp_path)


def state_of(attempt):
    return attempt.coordinator.outcome and attempt.coordinator.outcome["state"]


def culprit_of(attempt, *others):
    """Kill the others; return who is blamed."""
    for rank in others:
        attempt.end(rank, status=-9)
    attempt.tick()
    assert state_of(attempt) == "failed"
    return attempt.coordinator.outcome["culprit"]


def ask_to_join(attempt, rank, incarnation):
    attempt.take("started", rank, incarnation)
    attempt.take("joins", rank, incarnation)


def lose(attempt, rank, incarnation=0):
    """Kill a process; return which are started after a while."""
    attempt.end(rank, -9, incarnation=incarnation)
    attempt.tick(MOMENT_S)
    attempt.tick(REST_S)
    return [(start["rank"], start["incarnation"]) for _, start in attempt.commands_of("start")]


def test_an_address_that_cannot_be_read_keeps_no_loss_from_the_others(tmp_path):
    attempt = Attempt(tmp_path, nodes=4)
    (attempt.run.attempt(0) / "agent-00003.json").write_text("torn")
    attempt.coordinator.agent_disconnected(3)
    attempt.end(1, status=-9)
    for _ in range(200):
        attempt.tick(0.05)
    assert attempt.newest["members"] == [0, 2]


def test_the_first_generation_begins_when_all_workers_are_ready(tmp_path):
    attempt = Attempt(tmp_path, begin=False)
    for index in range(3):
        attempt.join(index)
    attempt.take("begins", 0, code={})
    attempt.take("begins", 1, code={})
    attempt.tick()
    assert attempt.newest is None
    attempt.take("begins", 2, code={})
    attempt.tick()
    assert attempt.newest["members"] == [0, 1, 2]


@pytest.mark.parametrize(("survive", "limit_s"), [(True, 5), (False, 20)])
def test_a_stopped_worker_is_given_up_after_a_limit(tmp_path, survive, limit_s):
    attempt = Attempt(tmp_path, survive=survive)
    for seconds in range(1, limit_s):
        attempt.take("stopped", 1, seconds=seconds, seen=SEEN)
    attempt.tick(GRACE_S)
    assert not attempt.commands_of("kill")
    attempt.take("stopped", 1, seconds=limit_s, seen=SEEN)
    attempt.tick(GRACE_S)
    assert not attempt.commands_of("die"), "the others may still write what they saw"
    attempt.tick(GRACE_S)
    assert len(attempt.commands_of("kill")) == 1
    assert len(attempt.commands_of("die")) == (not survive)


def stand(attempt, rank, standing, seconds=20.0, *, program=False, **seen):
    """An agent reports that a rank makes no progress."""
    position = {**SEEN, "at": f"at a place of rank {rank}", **seen}
    attempt.take(
        "standing", rank, standing=standing, seconds=seconds, program=program, seen=position
    )


def pass_s(attempt, seconds):
    """Let time pass, with all agents alive."""
    for _ in range(round(seconds)):
        attempt.tick(1.0)


HANG_S = 60


@pytest.mark.parametrize(
    ("standings", "program", "ended"),
    [
        (("waits", "waits", "waits"), False, True),
        (("waits", "waits", "moves"), False, False),
        (("waits", "waits", "declared"), False, False),
        (("waits", "waits", "busy"), False, False),
        (("idle", "idle", "idle"), True, True),
        (("idle", "idle", "busy"), True, False),
        (("idle", "idle", "moves"), True, False),
        (("idle", "idle", "done"), True, False),
    ],
)
def test_a_run_is_ended_once_no_rank_can_ever_make_progress(tmp_path, standings, program, ended):
    attempt = Attempt(tmp_path, survive=False)
    for rank, standing in enumerate(standings):
        stand(attempt, rank, standing, program=program, waits=f"{rank} s at a boundary")
    pass_s(attempt, HANG_S - 25)
    assert not attempt.commands_of("keep positions")
    warned = "".join(path.read_text() for path in attempt.run.attempt(0).glob("warnings-*"))
    assert ("cluster.hang_timeout_s" in warned, bool(attempt.commands_of("stacks"))) == (
        ended,
        ended,
    )
    pass_s(attempt, 40 if ended else 10_000)
    assert bool(attempt.commands_of("die")) == ended
    if ended:
        culprit = culprit_of(attempt, 0, 1, 2)
        assert culprit["hangs"]
        where = "at a place of rank 1" if program else "1 s at a boundary"
        assert mentions(culprit["cause"], f"rank 1 {where} (cluster.hang_timeout_s)")


def test_a_program_that_never_joined_is_blamed_for_the_others_wait(tmp_path):
    attempt = Attempt(tmp_path, survive=False)
    for rank in range(3):
        where = NOT_JOINED if rank == 1 else ""
        stand(attempt, rank, "idle", program=True, where=where)
    pass_s(attempt, HANG_S + 5)
    assert culprit_of(attempt, 0, 1, 2)["rank"] == 1


@pytest.mark.parametrize("other", ["busy", "moves", "declared"])
def test_a_rank_that_computes_while_others_wait_is_ended_only_if_a_key_says_so(tmp_path, other):
    attempt = Attempt(tmp_path, survive=False, collective_s=30.0)
    stand(attempt, 0, "waits")
    stand(attempt, 2, "waits")
    stand(attempt, 1, other)
    pass_s(attempt, 200)
    assert bool(attempt.commands_of("die")) == (other == "busy")
    if other == "busy":
        cause = culprit_of(attempt, 0, 1, 2)["cause"]
        assert mentions(cause, "(cluster.collective_timeout_s=30) at a place of rank 1"), cause


def test_no_member_is_ended_for_a_replacement_that_waits_to_be_let_in(tmp_path):
    attempt = Attempt(tmp_path, nodes=2, replacements=4, collective_s=30.0)
    lose(attempt, 1)
    ask_to_join(attempt, 1, 1)
    stand(attempt, 1, "waits")
    stand(attempt, 0, "busy")
    pass_s(attempt, 200)
    assert not attempt.commands_of("kill")


def test_members_that_wait_for_one_another_are_ended_though_a_replacement_computes(tmp_path):
    attempt = Attempt(tmp_path, replacements=4, collective_s=30.0)
    lose(attempt, 1)
    attempt.take("started", 1, 1)
    for rank, standing in ((0, "waits"), (1, "busy"), (2, "waits")):
        stand(attempt, rank, standing)
    pass_s(attempt, 100)
    assert attempt.commands_of("die")


def test_workers_learn_when_all_of_them_wait_and_when_that_ends(attempt):
    for rank in range(3):
        stand(attempt, rank, "waits")
    attempt.commands_of("tell")
    attempt.tick(1.0)
    [(_, command)] = attempt.commands_of("tell")
    assert command["message"]["standstill_s"] >= 5
    stand(attempt, 1, "moves", 0.0)
    attempt.tick(1.0)
    assert [c["message"] for _, c in attempt.commands_of("tell")] == [{"standstill_s": None}]


def test_workers_learn_from_a_new_coordinator_that_a_standstill_has_ended(tmp_path):
    first = Attempt(tmp_path)
    for rank in range(3):
        stand(first, rank, "waits")
    first.tick(1.0)
    second = Attempt(tmp_path, gone=[0], begin=False, index=1)
    second.join(1)
    second.join(2)
    second.tick()
    told = [agent for agent, c in second.commands_of("tell") if "standstill_s" in c["message"]]
    assert told == [1, 2]


def test_a_long_stall_is_written_down_once_for_notify(tmp_path):
    attempt = Attempt(tmp_path, survive=False)
    stand(attempt, 1, "declared")
    pass_s(attempt, 10)
    assert not attempt.run.stall(0).exists()
    pass_s(attempt, 20)
    first = attempt.run.stall(0).read_text()
    assert mentions(first, "rank 1 s at a place of rank 1"), first
    pass_s(attempt, 100)
    assert attempt.run.stall(0).read_text() == first
    stand(attempt, 1, "moves", 0.0)
    pass_s(attempt, 2)
    stand(attempt, 1, "idle")
    pass_s(attempt, 40)
    assert attempt.run.stall(0).read_text() != first, "another stall is another message"


def hang(attempt, kind, incarnation=0):
    """Have the second rank hang in its code, asleep, stopped, or in another rank's loss."""
    if kind == "stopped":
        attempt.take("stopped", 1, incarnation, seconds=100.0, seen=SEEN)
    elif kind == "stuck":
        attempt.take("stuck", 1, incarnation, cause="it did not come back")
    else:
        asleep = {"asleep": kind == "asleep", "silent": False}
        attempt.take("hangs", 1, incarnation, cause="it hangs: at a lock", **asleep, seen=SEEN)


def let_in(attempt, rank, incarnation):
    ask_to_join(attempt, rank, incarnation)
    number = attempt.newest["generation"]
    for member in attempt.newest["members"]:
        attempt.take("ready", member % attempt.spec.ranks, generation=number, updates=7)
    attempt.tick()
    assert rank + attempt.spec.ranks * incarnation in attempt.newest["members"]


def test_a_rank_that_hangs_again_is_not_ended_for_it_again(tmp_path):
    attempt = Attempt(tmp_path, replacements=3)
    hang(attempt, "code")
    assert lose(attempt, 1) == [(1, 1)]
    let_in(attempt, 1, 1)
    hang(attempt, "code", 1)
    attempt.tick(GRACE_S)
    attempt.tick(2 * GRACE_S)
    assert attempt.commands_of("die")
    attempt.end(1, -9, incarnation=1)
    assert "it hangs: at a lock" in culprit_of(attempt, 0, 2)["cause"]


def take_over(first, incarnation):
    """Have the third agent coordinate: the second rank's process is its newest one."""
    second = Attempt(first.run.path, gone=[0], begin=False, index=2, replacements=3)
    second.join(2)
    started = {"event": "started", "rank": 1, "incarnation": incarnation}
    second.coordinator.agent_connected(1, [{"rank": 1, "events": [started]}])
    second.tick(MOMENT_S)
    return second


def test_a_rank_that_hangs_again_after_a_takeover_is_not_ended_for_it_again(tmp_path):
    first = Attempt(tmp_path, replacements=3)
    hang(first, "code")
    assert lose(first, 1) == [(1, 1)]
    let_in(first, 1, 1)
    second = take_over(first, 1)
    hang(second, "code", 1)
    second.tick(GRACE_S)
    second.tick(2 * GRACE_S)
    assert second.commands_of("die")


def test_one_hang_counts_once_though_another_coordinator_hears_of_it_too(tmp_path):
    first = Attempt(tmp_path, replacements=3)
    hang(first, "code")
    lose(first, 2)
    assert first.newest["members"] == [0, 1]
    second = take_over(first, 0)
    hang(second, "code")
    second.tick(GRACE_S)
    second.tick(2 * GRACE_S)
    assert not second.commands_of("die")
    assert [c["rank"] for _, c in second.commands_of("kill")] == [1]


@pytest.mark.parametrize(
    ("first", "then"),
    [("stopped", "code"), ("asleep", "code"), ("stuck", "stuck"), ("stuck", "code")],
)
def test_what_was_no_fault_of_a_ranks_code_does_not_count_when_it_hangs(tmp_path, first, then):
    attempt = Attempt(tmp_path, replacements=3)
    hang(attempt, first)
    assert lose(attempt, 1) == [(1, 1)]
    let_in(attempt, 1, 1)
    hang(attempt, then, 1)
    pass_s(attempt, 5 * GRACE_S)
    assert not attempt.commands_of("die")
    assert [c["rank"] for _, c in attempt.commands_of("kill")] == [1, 1]


def test_replacements_that_hang_before_they_join_end_no_run(tmp_path):
    attempt = Attempt(tmp_path, replacements=16)
    lose(attempt, 1)
    for incarnation in range(1, 1 + MOST_FRUITLESS):
        attempt.take("started", 1, incarnation)
        hang(attempt, "code", incarnation)
        attempt.tick()
        assert [c["rank"] for _, c in attempt.commands_of("kill")] == [1]
        started = lose(attempt, 1, incarnation)
    assert not started, "no other one follows"
    pass_s(attempt, 5 * GRACE_S)
    assert not attempt.commands_of("die")


def test_a_worker_that_hangs_is_lost_where_the_others_survive_it(attempt):
    attempt.take(
        "hangs",
        1,
        cause="it hangs: it has been at the start",
        asleep=False,
        silent=False,
        seen=SEEN,
    )
    attempt.tick(GRACE_S)
    assert [(agent, c["rank"]) for agent, c in attempt.commands_of("kill")] == [(1, 1)]
    attempt.end(1, status=-9)
    attempt.tick(MOMENT_S)
    assert attempt.newest["members"] == [0, 2]
    assert attempt.newest["why"] == ["on node1: it hangs: it has been at the start"]
    warned = attempt.run.warnings(0, 1).read_text()
    assert mentions(warned, "it hangs: it has been at the start; others"), warned


ASLEEP = {"cause": "it hangs, asleep in nfs_wait", "asleep": True, "silent": True, "seen": SEEN}


def test_a_rank_that_sleeps_in_the_kernel_is_left_behind_until_it_wakes_and_ends(tmp_path):
    attempt = Attempt(tmp_path, replacements=4)
    attempt.take("hangs", 1, **ASLEEP)
    pass_s(attempt, KILL_S - 1)
    assert attempt.newest["members"] == [0, 1, 2], "it may take a moment to end"
    pass_s(attempt, 3)
    assert attempt.newest["members"] == [0, 2]
    assert mentions(attempt.newest["why"][0], f"asleep in nfs_wait; SIGKILL {KILL_S:g} s kernel")
    pass_s(attempt, 100)
    assert not attempt.commands_of("start"), "its agent starts no second one"
    attempt.end(1, status=-9)
    pass_s(attempt, 2)
    assert [c["incarnation"] for _, c in attempt.commands_of("start")] == [1]
    assert attempt.newest["members"] == [0, 2]


def test_a_rank_that_sleeps_in_the_kernel_is_ended_once_though_its_agent_connects_again(tmp_path):
    attempt = Attempt(tmp_path, replacements=4)
    attempt.take("hangs", 1, **ASLEEP)
    pass_s(attempt, KILL_S + 2)
    events = [{"event": "started"}, {"event": "hangs", **ASLEEP}]
    repeated = [{**event, "rank": 1, "incarnation": 0} for event in events]
    attempt.commands.clear()
    attempt.coordinator.agent_connected(1, [{"rank": 1, "events": repeated}])
    pass_s(attempt, KILL_S + 2)
    assert not attempt.commands_of("kill")
    ended = {**KILLED, "incarnation": 0, "seen": SEEN, "ago_s": 0.0}
    attempt.coordinator.agent_connected(1, [{"rank": 1, "events": [*repeated, ended]}])
    pass_s(attempt, 2)
    assert len(attempt.commands_of("start")) == 1


def test_an_agent_that_is_started_again_starts_what_slept_under_the_one_before(tmp_path):
    attempt = Attempt(tmp_path, replacements=4)
    attempt.take("hangs", 1, **ASLEEP)
    pass_s(attempt, KILL_S + 2)
    attempt.lose_agent(1)
    pass_s(attempt, 2)
    assert attempt.coordinator.wanted_agents() == [1]
    attempt.coordinator.agent_connected(1, [])
    attempt.tick()
    assert len(attempt.commands_of("start")) == 1


def test_a_rank_that_is_killed_before_its_start_is_reported_may_sleep_in_the_kernel(tmp_path):
    attempt = Attempt(tmp_path, nodes=2, ranks_per_node=2, whole_nodes=True, replacements=8)
    attempt.end(2, -9)
    attempt.end(3, -9)
    attempt.tick(MOMENT_S)
    attempt.tick(REST_S)
    assert len(attempt.commands_of("start")) == 2
    attempt.take("started", 3, 1)
    attempt.end(3, -9, incarnation=1)
    assert [c["rank"] for _, c in attempt.coordinator.commands()] == [2]
    attempt.take("started", 2, 1)
    pass_s(attempt, KILL_S + 1)
    assert mentions(attempt.run.warnings(0, 1).read_text(), f"SIGKILL {KILL_S:g} s kernel")


def test_a_rank_is_killed_again_if_its_agent_connects_again(tmp_path):
    """The first order may have been lost with the link. It was lost together with another rank."""
    attempt = Attempt(tmp_path, nodes=2, ranks_per_node=2, whole_nodes=True)
    attempt.end(3, -9)
    attempt.tick()
    assert [c["rank"] for _, c in attempt.commands_of("kill")] == [2]
    attempt.coordinator.agent_disconnected(1)
    started = {"event": "started", "rank": 2, "incarnation": 0}
    ended = {**KILLED, "rank": 3, "incarnation": 0, "seen": SEEN, "ago_s": 0.0}
    workers = [{"rank": 2, "events": [started]}, {"rank": 3, "events": [ended]}]
    attempt.coordinator.agent_connected(1, workers)
    attempt.tick()
    assert [c["rank"] for _, c in attempt.commands_of("kill")] == [2]


def test_a_rank_is_not_kept_without_the_rest_of_its_node(tmp_path):
    """Its agent was silent, and connects again; meanwhile its other rank was killed."""
    attempt = Attempt(tmp_path, nodes=2, ranks_per_node=2, whole_nodes=True, replacements=8)
    with listen("127.0.0.1") as listener:
        attempt.lose_agent(1, listener.getsockname()[1])
        attempt.tick(attempt.spec.silence_s + 1)
    assert attempt.coordinator.agents[1].lost
    started = {"event": "started", "incarnation": 0}
    ended = {**KILLED, "rank": 2, "incarnation": 0, "seen": SEEN, "ago_s": 0.0}
    workers = [
        {"rank": 2, "events": [{**started, "rank": 2}, ended]},
        {"rank": 3, "events": [{**started, "rank": 3}]},
    ]
    attempt.coordinator.agent_connected(1, workers)
    attempt.tick(MOMENT_S)
    assert [c["rank"] for _, c in attempt.commands_of("kill")] == [3]
    assert attempt.newest["gone"] == [2, 3]
    attempt.end(3, -9)
    attempt.tick(REST_S)
    assert len(attempt.commands_of("start")) == 2


@pytest.mark.parametrize("survive", [False, True])
def test_a_run_ends_though_a_rank_sleeps_in_the_kernel(tmp_path, survive):
    """With `survive` it is none of the members any more, and the others finish."""
    attempt = Attempt(tmp_path, survive=survive, replacements=4 * survive)
    if survive:
        assert lose(attempt, 1) == [(1, 1)]
        attempt.take("started", 1, 1)
    else:
        attempt.take("hangs", 1, **ASLEEP)
        pass_s(attempt, STACK_S + 1)
    for rank in (0, 2):
        attempt.end(rank, *([0, "finished"] if survive else [-9]))
    pass_s(attempt, 2 * KILL_S)
    assert state_of(attempt) == ("finished" if survive else "failed")


def test_waits_for_a_lost_rank_do_not_count_against_those_that_continue(attempt):
    for rank in (0, 2):
        stand(attempt, rank, "waits")
    pass_s(attempt, 2 * HANG_S)  # rank 1 is idle in its code
    attempt.take("hangs", 1, cause="it hangs: at a lock", **AWAKE, seen=SEEN)
    attempt.end(1, status=-9)
    pass_s(attempt, 2)
    warnings = attempt.run.attempt(0).glob("warnings-*")
    assert "cluster.hang_timeout_s" not in "".join(path.read_text() for path in warnings)
    pass_s(attempt, HANG_S / 2)
    assert attempt.newest["members"] == [0, 2]
    assert not attempt.commands_of("die"), "they have just begun to wait for one another"
    pass_s(attempt, HANG_S)
    assert attempt.commands_of("die"), "now they wait for one another"


@pytest.mark.parametrize(("standing", "program"), [("waits", False), ("idle", True)])
def test_waits_for_a_rank_that_has_finished_count_from_its_end(tmp_path, standing, program):
    attempt = Attempt(tmp_path, survive=False)
    for rank in (1, 2):
        stand(attempt, rank, standing, program=program)
    stand(attempt, 0, "declared")
    pass_s(attempt, 2 * HANG_S)  # its last evaluation
    attempt.end(0, final_state="finished")
    pass_s(attempt, HANG_S / 2)  # the others' agents report late that they make progress again
    assert not attempt.commands_of("die")
    pass_s(attempt, HANG_S)
    assert attempt.commands_of("die"), "they wait for what never comes"


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("late", ["waits", "busy"])
def test_no_verdict_rests_on_the_last_report_of_an_agent_that_is_late(tmp_path, late, broken):
    attempt = Attempt(tmp_path, survive=False, collective_s=15.0, heartbeat_s=150.0, hang_s=600.0)
    stand(attempt, 0, "waits")
    stand(attempt, 1, late)
    stand(attempt, 2, "waits")
    if broken:
        attempt.coordinator.agent_disconnected(1)
    for _ in range(100):  # in which only its agent knows that rank 1 makes progress
        attempt.now += 1.0
        for index in (0, 2):
            attempt.coordinator.heard(index)
        attempt.coordinator.tick()
        attempt.commands += attempt.coordinator.commands()
    assert not attempt.commands_of("die")
    if broken:
        attempt.join(1)
    attempt.tick()
    assert not attempt.commands_of("die"), "its news may come in a moment"
    stand(attempt, 1, "moves")
    pass_s(attempt, 100)
    assert not attempt.commands_of("die")


@pytest.mark.parametrize(
    "is_heard",
    [lambda second: second % 10 >= 3, lambda second: not second % 6],
    ids=["often", "always"],
)
def test_a_standstill_is_ended_though_agents_are_late(tmp_path, is_heard):
    attempt = Attempt(tmp_path, survive=False)
    for rank in range(3):
        stand(attempt, rank, "waits")
    for second in range(3 * HANG_S):
        attempt.now += 1.0
        for index in range(3):
            if index == 0 or is_heard(second):
                attempt.coordinator.heard(index)
        attempt.coordinator.tick()
        attempt.commands += attempt.coordinator.commands()
    assert attempt.commands_of("die")
    assert culprit_of(attempt, 0, 1, 2)["cause"].startswith("it hangs: ")


def test_an_end_from_before_all_were_killed_is_the_cause_though_it_is_reported_after(tmp_path):
    attempt = Attempt(tmp_path, nodes=2, ranks_per_node=1, survive=False)
    lost = {"rank": 0, "node": "node0", "cause": "lost rank 1", "secondary": True, "usage": False}
    attempt.end(0, status=1, final_state="failed", failure=lost | {"time": attempt.now})
    attempt.tick(GRACE_S + 0.5)
    assert attempt.commands_of("die")
    ended = {"status": -9, "final_state": "", "failure": None, "out_of_memory": True}
    attempt.take("exit", 1, **ended, seen=SEEN, ago_s=GRACE_S + 0.6)
    attempt.tick()
    culprit = culprit_of(attempt)
    assert (culprit["rank"], "memory" in culprit["cause"]) == (1, True)


def test_a_rank_whose_agent_is_late_is_not_said_to_sleep_in_the_kernel(tmp_path):
    attempt = Attempt(tmp_path, nodes=2, survive=False)
    attempt.end(0, status=1, final_state="failed")
    attempt.tick(GRACE_S + 0.1)
    assert attempt.commands_of("die")
    for _ in range(int(KILL_S) + 5):
        attempt.now += 1.0
        attempt.coordinator.heard(0)
        attempt.coordinator.tick()
    assert state_of(attempt) is None, "its process may live, and write"
    pass_s(attempt, 1)
    assert state_of(attempt) == "failed", "the agent has not told of its end since"


def test_ranks_that_were_all_ended_for_hanging_are_not_said_to_be_killed(attempt):
    for rank in (1, 0, 2):
        attempt.take("hangs", rank, cause=f"it hangs: rank {rank} at a lock", **AWAKE, seen=SEEN)
        attempt.tick(GRACE_S)
    culprit = culprit_of(attempt, 0, 1, 2)
    assert culprit["cause"].startswith(f"it hangs: rank {culprit['rank']} at a lock")


def test_a_worker_that_hangs_is_blamed_once_another_has_saved_the_last_boundary(tmp_path):
    attempt = Attempt(tmp_path, survive=False)
    stack = [["train.py", 31, "load_batch"]]
    seen = {"at": "at micro-step 1", "waits": "", "stack": stack, "stood_s": 9.0}
    attempt.take("hangs", 1, cause="it hangs", **AWAKE, seen=seen)
    attempt.tick(GRACE_S)
    assert attempt.commands_of("kill")
    attempt.end(1, status=-9)
    attempt.take("can_save", 2, able=False)
    attempt.take("can_save", 0, able=True)
    attempt.take("save_ready", 0, updates=2)
    attempt.tick(5 * GRACE_S)
    assert not attempt.commands_of("die"), "rank 0 still saves"
    waits = {"at": "", "waits": "9 s at the boundary of update 3", "stack": [], "stood_s": 0.0}
    attempt.take("exit", 0, status=1, final_state="failed", failure=None, seen=waits, ago_s=0.0)
    attempt.tick(GRACE_S)
    assert attempt.commands_of("die")
    culprit = culprit_of(attempt, 2)
    assert culprit["rank"] == 1
    assert mentions(culprit["cause"], "it hangs; rank 0 9 s at the boundary of update 3")
    assert culprit["log_tail"] == ['  File "train.py", line 31, in load_batch']


@pytest.mark.parametrize("survive", [True, False])
def test_the_live_rank_with_the_most_updates_saves_the_last_boundary(tmp_path, survive):
    attempt = Attempt(tmp_path, survive=survive)
    attempt.take("save_ready", 1, updates=6)  # it has lost a peer, before its end is known
    attempt.tick()
    attempt.end(0, status=-11)
    attempt.take("can_save", 2, able=True)
    attempt.tick(3 * GRACE_S)
    assert not any("saver" in c["message"] for _, c in attempt.commands_of("tell"))
    attempt.take("save_ready", 2, updates=7)
    attempt.tick()
    chosen = [c["message"] for _, c in attempt.commands_of("tell") if "saver" in c["message"]]
    assert chosen == [{"saver": 2}]
    attempt.tick(50 * GRACE_S)
    assert not attempt.commands_of("die"), "its disk may be slow"
    for rank in (1, 2):
        attempt.end(rank, status=1, final_state="failed")
    attempt.tick()
    assert state_of(attempt) == "failed"


@pytest.mark.parametrize("answers", [True, False])
def test_the_answer_of_a_rank_whose_agent_is_late_is_awaited(tmp_path, answers):
    attempt = Attempt(tmp_path, survive=False)
    for rank in range(3):
        attempt.take("trains", rank)
    attempt.end(0, status=-11)
    attempt.tick()
    attempt.take("can_save", 1, able=False)
    attempt.tick(2 * GRACE_S)
    assert not attempt.commands_of("die")
    if answers:
        attempt.take("save_ready", 2, updates=7)
        attempt.tick(LEAST_SILENCE_S)
        messages = [c["message"] for _, c in attempt.commands_of("tell")]
        assert {"saver": 2} in messages
    attempt.tick(LEAST_SILENCE_S)
    assert bool(attempt.commands_of("die")) != answers


def test_a_rank_that_failed_itself_saves_the_last_boundary_only_if_no_other_can(tmp_path):
    for others in (True, False):
        attempt = Attempt(tmp_path / str(others), survive=False)
        for rank in (0, 1, 2):
            attempt.take("save_ready", rank, updates=7 - rank, failed=not (others and rank))
            attempt.tick()
        chosen = [c["message"] for _, c in attempt.commands_of("tell") if "saver" in c["message"]]
        assert chosen == [{"saver": 1 if others else 0}]


def test_no_rank_saves_weights_on_which_the_ranks_disagree(attempt):
    attempt.end(0, status=1, final_state="failed", failure={**RAISED, "replicas_differ": True})
    attempt.take("can_save", 1, able=True)
    attempt.take("save_ready", 1, updates=6)
    attempt.tick(GRACE_S)
    assert attempt.commands_of("die")


def test_a_folder_is_removed_once_it_is_missing_for_seconds(attempt):
    folder, aside = attempt.run.attempt(0), attempt.run.path / "aside"
    for _ in range(2):
        folder.rename(aside)
        for _ in range(MISSING_FOLDER_CHECKS - 1):
            attempt.tick(1.0)
        aside.rename(folder)
        attempt.tick(1.0)
    assert not attempt.commands_of("die")
    shutil.rmtree(folder)
    for _ in range(MISSING_FOLDER_CHECKS):
        attempt.tick(1.0)
    assert attempt.commands_of("die")


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_run_ends_as_all_its_workers_do(attempt, state):
    for rank in range(3):
        attempt.end(rank, final_state=state)
    attempt.tick()
    assert state_of(attempt) == state
    assert attempt.commands_of("end") == [(None, {"command": "end"})]


def test_a_killed_worker_is_left_behind_by_a_new_generation(attempt):
    attempt.end(1, status=-9)
    attempt.tick()
    assert attempt.newest["generation"] == 0, "what dies together should cost one generation"
    attempt.tick(MOMENT_S)
    assert attempt.newest["members"] == [0, 2]
    assert attempt.newest["gone"] == [1]
    assert attempt.newest["why"] == [f"on node1: {describe_status(-9)}"]
    for rank in (0, 2):
        attempt.end(rank, final_state="finished")
    attempt.tick()
    assert state_of(attempt) == "finished"


RAISED = {
    "rank": 1,
    "node": "node1",
    "time": 1.0,
    "cause": "ValueError: no",
    "usage": False,
    "secondary": False,
}


@pytest.mark.parametrize(
    ("survive", "ended", "cause"),
    [
        (True, {"status": 1, "final_state": "failed", "failure": RAISED}, "ValueError: no"),
        (False, {"status": 1, "final_state": "failed", "failure": RAISED}, "ValueError: no"),
        (True, {"status": 0}, describe_status(0) + NO_EXIT_REPORT),
        (False, {"status": -9}, describe_status(-9)),
    ],
)
def test_an_end_that_the_others_do_not_survive_fails_the_run(tmp_path, survive, ended, cause):
    attempt = Attempt(tmp_path, survive=survive)
    attempt.end(1, **ended)
    attempt.tick()
    assert not attempt.commands_of("die")
    attempt.tick(GRACE_S)
    assert attempt.commands_of("die")
    culprit = culprit_of(attempt, 0, 2)
    assert culprit["rank"] == 1
    assert culprit["cause"].startswith(cause)


def test_a_killed_worker_is_started_again_and_let_in_at_a_boundary(tmp_path):
    attempt = Attempt(tmp_path, replacements=2)
    assert lose(attempt, 1) == [(1, 1)]
    ask_to_join(attempt, 1, 1)
    attempt.commands_of("tell")
    attempt.tick(1.0)
    assert [c["message"] for _, c in attempt.commands_of("tell")] == [{"newcomers": True}]
    attempt.take("ready", 0, generation=1, updates=7)
    attempt.tick()
    assert attempt.newest["members"] == [0, 2], "not all are at the boundary"
    attempt.take("ready", 2, generation=1, updates=7)
    attempt.tick()
    assert attempt.newest["members"] == [0, 2, 4]
    assert attempt.newest["updates"] == 7


def test_newcomers_are_announced_again_to_a_leader_whose_link_was_broken(tmp_path):
    attempt = Attempt(tmp_path, replacements=2)
    assert lose(attempt, 0) == [(0, 1)]
    ask_to_join(attempt, 0, 1)
    attempt.tick(2.0)
    attempt.commands.clear()
    reconnect(attempt, 0)
    told = [
        (agent, c["rank"])
        for agent, c in attempt.commands_of("tell")
        if "newcomers" in c["message"]
    ]
    assert told == [(1, 1)]


def test_a_node_is_killed_as_a_whole_though_some_of_its_ranks_only_start(tmp_path):
    attempt = Attempt(tmp_path, nodes=2, ranks_per_node=2, whole_nodes=True, replacements=16)
    for rank in (2, 3):
        attempt.end(rank, -9)
    attempt.tick(MOMENT_S)
    attempt.tick(REST_S)
    attempt.commands.clear()
    attempt.end(2, -9, incarnation=1)  # before the other one is said to be started
    attempt.take("started", 3, 1)
    attempt.tick()
    assert [c["rank"] for _, c in attempt.commands_of("kill")] == [3]
    attempt.end(3, -9, incarnation=1)
    attempt.tick(REST_S)
    started = [(c["rank"], c["incarnation"]) for _, c in attempt.commands_of("start")]
    assert started == [(2, 2), (3, 2)], "they join together"


def test_members_that_wait_for_a_newcomer_that_dies_continue_without_it(tmp_path):
    attempt = Attempt(tmp_path, replacements=1)
    lose(attempt, 1)
    ask_to_join(attempt, 1, 1)
    attempt.tick(1.0)
    attempt.take("ready", 0, generation=1, updates=7)
    attempt.end(1, status=-9, incarnation=1)
    attempt.take("ready", 2, generation=1, updates=7)
    attempt.tick(MOMENT_S)
    assert (attempt.newest["generation"], attempt.newest["members"]) == (2, [0, 2])


@pytest.mark.parametrize("did_an_update", [True, False])
def test_a_rank_whose_processes_come_to_nothing_is_given_up(tmp_path, did_an_update):
    attempt = Attempt(tmp_path, replacements=16)
    assert lose(attempt, 1) == [(1, 1)]
    ask_to_join(attempt, 1, 1)
    for rank in (0, 2):
        attempt.take("ready", rank, generation=1, updates=7)
    attempt.tick()
    ProgressWriter(attempt.run.progress(0)).write(9 if did_an_update else 7, 3, 4)
    assert lose(attempt, 1, 1) == [(1, 2)]
    attempt.take("started", 1, 2)
    if did_an_update:
        assert lose(attempt, 1, 2) == [(1, 3)]  # on its way in, as the next one
        attempt.take("started", 1, 3)
    assert lose(attempt, 1, 2 + did_an_update) == []
    warned = attempt.run.warnings(0, 1).read_text()
    assert mentions(warned, f"{MOST_FRUITLESS} processes update"), warned
    assert lose(attempt, 2) == [(2, 1)], "another one is"


def test_no_more_processes_are_started_than_were_asked_for(tmp_path):
    attempt = Attempt(tmp_path, nodes=4, replacements=1)
    attempt.end(2, -9)
    assert lose(attempt, 3) == [(2, 1)], "the other one is promised"
    assert lose(attempt, 1) == []
    for index in (1, 3):
        assert mentions(attempt.run.warnings(0, index).read_text(), "run.max_replacements=1")


def test_those_that_wait_for_a_generation_learn_that_a_full_disk_delays_it(attempt, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("orchestrator.rundir.generations.create_once", refuse)
        attempt.end(1, status=-9)
        for _ in range(20):
            attempt.tick(0.5)
    delays = [c["message"] for _, c in attempt.commands_of("tell")].count({"delayed": True})
    assert delays == 10, "once a second"
    attempt.tick()
    assert attempt.newest["members"] == [0, 2]


REFUSALS = [OSError(28, "No space left on device"), RunFolderError("the file is a link")]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_warning_that_cannot_be_written_keeps_no_rank_from_being_ended(
    attempt, monkeypatch, refusal
):
    def refuse(*_):
        raise refusal

    monkeypatch.setattr("orchestrator.rundir.warnings.open_nofollow", refuse)
    attempt.take("hangs", 1, cause="it hangs", **AWAKE, seen=SEEN)
    attempt.tick()
    assert [c["rank"] for _, c in attempt.commands_of("kill")] == [1]


HANGS = {"event": "hangs", "rank": 1, "cause": "it hangs", **AWAKE, "seen": SEEN}
KILLED = {"event": "exit", "rank": 1, "status": -9, "final_state": "", "failure": None}


def reconnect(attempt, incarnation, *events):
    """Have the second agent connect again, which repeats what it knows of its worker."""
    begun = (
        {"event": "started", "rank": 1},
        {"event": "begins", "rank": 1, "code": {"job": "abc"}},
    )
    repeated = [{**event, "incarnation": incarnation} for event in (*begun, *events)]
    attempt.coordinator.agent_disconnected(1)
    attempt.coordinator.agent_connected(1, [{"rank": 1, "events": repeated}])
    for _ in range(30):
        attempt.tick(1.0)


@pytest.mark.parametrize("hung", [False, True])
def test_an_end_that_was_survived_does_not_count_again_when_its_agent_reconnects(attempt, hung):
    if hung:
        attempt.take(**HANGS)
    assert lose(attempt, 1) == []
    for _ in range(2):
        attempt.tick(3600.0)
        attempt.commands.clear()
        reconnect(attempt, 0, *[HANGS][:hung], {**KILLED, "seen": SEEN, "ago_s": 0.0})
        assert not attempt.commands_of("die")
        assert not attempt.commands_of("kill")
    assert attempt.outcome is None
    assert attempt.newest["members"] == [0, 2]


def test_a_hanging_process_is_ended_once_though_its_agent_reconnects_before_that(attempt):
    attempt.take(**HANGS)
    reconnect(attempt, 0, HANGS)
    assert [c["rank"] for _, c in attempt.commands_of("kill")] == [1, 1], "one may not have arrived"
    assert lose(attempt, 1) == []
    assert attempt.outcome is None
    assert attempt.run.warnings(0, 1).read_text().count('"sentence": "it hangs; ') == 1


def test_a_process_without_an_update_counts_once_though_its_agent_reconnects(tmp_path):
    attempt = Attempt(tmp_path, replacements=16)
    assert lose(attempt, 1) == [(1, 1)]
    attempt.take("started", 1, 1)
    assert lose(attempt, 1, 1) == [(1, 2)]
    reconnect(attempt, 1, {**KILLED, "seen": SEEN, "ago_s": 0.0})  # to which that was not sent
    assert [c["incarnation"] for _, c in attempt.commands_of("start")] == [2]
    assert MOST_FRUITLESS == 2, "else this shows nothing"


@pytest.mark.parametrize("asleep", [False, True])
def test_a_rank_that_stands_still_for_no_fault_of_the_job_is_bad_luck_once(tmp_path, asleep):
    lost = []
    for number in range(4):
        attempt = Attempt(tmp_path, survive=False, attempt=number)
        if asleep:
            attempt.take(**{**HANGS, "asleep": True})
        else:
            attempt.take("stopped", 1, seconds=100.0, seen=SEEN)
        attempt.tick(STACK_S)
        culprit_of(attempt, 0, 1, 2)
        lost.append(attempt.coordinator.outcome["lost"] is not None)
    assert lost == [True, *3 * [not asleep]], "a signal comes from outside, each time"


def test_a_standstill_is_written_down_for_notify_though_the_disk_was_full(tmp_path, monkeypatch):
    attempt = Attempt(tmp_path, survive=False)
    refusals = [OSError(28, "No space left on device")]

    def full_once(*written):
        if refusals:
            raise refusals.pop()
        write_json(*written)

    monkeypatch.setattr("orchestrator.agent.standstills.write_json", full_once)
    stand(attempt, 1, "declared")
    attempt.tick(400.0)
    assert not attempt.run.stall(0).exists()
    attempt.tick(1.0)
    assert attempt.run.stall(0).exists()


def test_a_standstill_ends_a_run_though_the_disk_is_full(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    attempt = Attempt(tmp_path, survive=False)
    monkeypatch.setattr("orchestrator.agent.standstills.write_json", refuse)
    for rank in range(3):
        stand(attempt, rank, "waits")
    pass_s(attempt, HANG_S + 5)
    assert attempt.commands_of("die")


def test_a_folder_that_cannot_be_read_keeps_no_event_from_its_effect(tmp_path, monkeypatch):
    def stale(*_):
        raise OSError(116, "Stale file handle")

    attempt = Attempt(tmp_path, replacements=3)
    assert lose(attempt, 1) == [(1, 1)]
    attempt.take("started", 1, 1)
    monkeypatch.setattr("orchestrator.agent.replacements.read_progress", stale)
    monkeypatch.setattr("orchestrator.agent.root_cause.read_end", stale)
    monkeypatch.setattr("pathlib.Path.open", stale)
    attempt.take("hangs", 1, 1, cause="it hangs", **AWAKE, seen=SEEN)
    attempt.take("stopped", 2, seconds=100.0, seen=SEEN)
    attempt.end(1, status=-9, incarnation=1)
    attempt.tick(REST_S)
    assert {c["rank"] for _, c in attempt.commands_of("kill")} == {1, 2}
    assert [c["incarnation"] for _, c in attempt.commands_of("start")] == [2]


def test_a_restarted_agent_without_workers_ends_the_run_of_its_only_node(tmp_path):
    Attempt(tmp_path, nodes=1, ranks_per_node=2)  # its agent is killed, with both workers
    again = Attempt(tmp_path, nodes=1, ranks_per_node=2, begin=False)
    again.coordinator.agent_connected(0, [])
    again.tick(MOMENT_S)
    assert state_of(again) == "failed"


def test_a_node_that_is_gone_takes_its_workers_with_it_and_may_come_back(tmp_path):
    attempt = Attempt(tmp_path, ranks_per_node=2, replacements=4)
    attempt.lose_agent(1)
    attempt.tick()
    attempt.tick(MOMENT_S)
    assert attempt.newest["gone"] == [2, 3]
    assert attempt.newest["why"] == [f"on node1: {AGENT_GONE.removeprefix(NODE_WENT_AWAY)}"]
    attempt.tick(1.0)
    assert attempt.commands_of("start") == [], "there is no agent to start them"
    attempt.coordinator.agent_connected(1, [])
    attempt.tick()
    assert [(a, c["rank"]) for a, c in attempt.commands_of("start")] == [(1, 2), (1, 3)]


@pytest.mark.parametrize("begun", [True, False])
def test_an_agent_that_connects_again_costs_no_run_that_would_not_survive_its_loss(tmp_path, begun):
    attempt = Attempt(tmp_path, survive=not begun, begin=begun)
    if not begun:
        for index in range(3):
            attempt.join(index)
    with listen("127.0.0.1") as listener:
        attempt.lose_agent(1, listener.getsockname()[1])
        pass_s(attempt, attempt.spec.heartbeat_s - 1)
        attempt.join(1)
        pass_s(attempt, 2 * attempt.spec.heartbeat_s)
        assert not attempt.commands_of("die")
        attempt.lose_agent(1, listener.getsockname()[1])
        pass_s(attempt, attempt.spec.heartbeat_s + 2)
        assert attempt.commands_of("die"), "it did not"


def test_no_process_is_started_while_the_link_is_broken_that_would_tell_of_it(tmp_path):
    attempt = Attempt(tmp_path, replacements=2)
    attempt.end(1, status=-9)
    with listen("127.0.0.1") as listener:
        attempt.lose_agent(1, listener.getsockname()[1])
        pass_s(attempt, 2)
        assert not attempt.commands_of("start")
        attempt.coordinator.agent_connected(1, [])
        attempt.tick()
        assert [c["incarnation"] for _, c in attempt.commands_of("start")] == [1]


def test_a_node_that_comes_late_after_a_takeover_keeps_its_workers(tmp_path):
    Attempt(tmp_path, survive=True)
    later = Attempt(tmp_path, gone=[0], begin=False, replacements=4)
    later.join(1)
    later.tick(COME_S + 1)  # the third agent is taken for lost
    later.tick(REST_S)
    later.join(2)
    later.tick(REST_S)
    assert {c["rank"] for _, c in later.commands_of("start")} <= {0}
    later.end(2, final_state="evicted")
    later.tick(REST_S)
    [(_, start)] = later.commands_of("start")
    assert (start["rank"], start["incarnation"]) == (2, 1)


@pytest.mark.parametrize("survive", [True, False])
def test_ranks_that_had_finished_before_their_coordinator_was_lost_have_finished(
    tmp_path, monkeypatch, survive
):
    """The others may still save or evaluate, for which the lost ones are not needed."""
    run = tmp_path / "run"
    sim = Simulation(run, 0, monkeypatch, nodes=2, survive=survive)
    try:
        while sim.newest()["generation"] < 0:
            sim.step()
        first, last = sorted(sim.live(), key=lambda process: process.rank)
        sim.end(first, 0, "finished")
        sim.enter(last, ENDS)
        last.leave_at = sim.now + 30.0
        until = sim.now + 5.0
        while sim.now < until:
            sim.step()
        sim.end_agent(0, killed=True)
        while sim.agents and sim.now < until + 60.0:
            sim.step()
        assert sim.outcome["state"] == "finished", sim.log
        assert last.final_state == "finished"
    finally:
        sim.close()


def test_a_new_coordinator_knows_from_the_record_and_the_agents(tmp_path):
    first = Attempt(tmp_path)
    first.end(1, status=-9)
    first.tick(MOMENT_S)
    second = Attempt(tmp_path, gone=[0], begin=False, index=1)
    ended = {
        "event": "exit",
        "rank": 1,
        "incarnation": 0,
        "status": -9,
        "ago_s": 5.0,
        "final_state": "",
        "failure": None,
        "seen": SEEN,
    }
    started = {"event": "started", "rank": 1, "incarnation": 0}
    second.coordinator.agent_connected(1, [{"rank": 1, "events": [started, ended]}])
    second.tick(MOMENT_S)
    assert second.newest["generation"] == 1, "one agent has not come yet"
    second.coordinator.agent_connected(2, [{"rank": 2, "events": [{**started, "rank": 2}]}])
    second.tick(MOMENT_S)
    assert second.newest["members"] == [2]
    second.end(2, final_state="finished")
    second.tick()
    assert state_of(second) == "finished"


@pytest.mark.parametrize(("listens", "generation"), [(True, 0), (False, 1)])
def test_the_smaller_half_waits_if_others_may_live(attempt, listens, generation):
    """Two of three nodes fall silent; only one that died refuses connections."""
    with listen("127.0.0.1") as listener:
        for index in (1, 2):
            attempt.lose_agent(index, listener.getsockname()[1] if listens else None)
        pass_s(attempt, attempt.spec.silence_s + 1)
        attempt.tick(MOMENT_S)
        assert attempt.newest["generation"] == generation
        attempt.tick(5.0)
        assert attempt.newest["generation"] == 1, "the others must not continue"


def test_a_half_that_was_the_smaller_one_waits_no_longer_once_another_node_is_back(tmp_path):
    Attempt(tmp_path)
    later = Attempt(tmp_path, gone=[0], begin=False, index=1)
    later.join(1)
    later.tick(COME_S + 1)
    later.tick(MOMENT_S)
    assert later.newest["generation"] == 0, "two of three are out of reach"
    later.join(2)
    later.tick(MOMENT_S)
    assert later.newest["members"] == [1, 2]


def test_no_newcomer_joins_once_a_worker_has_finished(tmp_path):
    attempt = Attempt(tmp_path, replacements=2)
    attempt.end(1, status=-9)
    attempt.tick(MOMENT_S)
    attempt.end(0, final_state="finished")
    attempt.tick(1.0)
    assert attempt.commands_of("start") == []
    assert {"left": True} in [c["message"] for _, c in attempt.commands_of("tell")]


def test_a_replacement_that_starts_after_a_worker_has_finished_is_ended(tmp_path):
    attempt = Attempt(tmp_path, replacements=2)
    assert lose(attempt, 1) == [(1, 1)]
    attempt.end(0, final_state="finished")
    attempt.take("started", 1, incarnation=1)
    attempt.tick()
    assert [c["rank"] for _, c in attempt.commands_of("kill")] == [1]


def test_a_node_that_comes_back_before_its_loss_was_noticed_is_named(tmp_path):
    attempt = Attempt(tmp_path, survive=False)
    attempt.coordinator.agent_connected(1, [])
    attempt.tick(GRACE_S)
    culprit = culprit_of(attempt, 0, 2)
    assert (culprit["rank"], culprit["node"]) == (None, "node1")
    assert culprit["cause"] == AGENT_GONE


@pytest.mark.parametrize("others_live", [True, False])
def test_an_evicted_node_leaves_the_outcome_to_the_nodes_that_continue(tmp_path, others_live):
    """The first node continued without this one, and sends it nothing; it may have died."""
    run = RunDir(tmp_path)
    run.attempt(0).mkdir(parents=True)
    record = GenerationRecord(run.attempt(0))
    record.publish(0, [0, 1])
    record.publish(1, [0], gone=[1])
    listener = listen("127.0.0.1")
    publish_agent(node_spec(tmp_path, nodes=2), listener.getsockname()[1])
    if not others_live:
        listener.close()
    evicted = Attempt(tmp_path, nodes=2, index=1, gone=[0], begin=False)
    evicted.join(1)
    evicted.end(1, 75, "evicted")
    evicted.tick(MOMENT_S)
    assert evicted.commands_of("end")
    assert (evicted.outcome is None) == others_live
    listener.close()


def test_an_evicted_node_does_not_wait_for_an_address_that_stays_unreadable(tmp_path):
    run = RunDir(tmp_path)
    run.attempt(0).mkdir(parents=True)
    record = GenerationRecord(run.attempt(0))
    record.publish(0, [0, 1])
    record.publish(1, [0], gone=[1])
    (run.attempt(0) / "agent-00000.json").write_text("torn")
    evicted = Attempt(tmp_path, nodes=2, index=1, gone=[0], begin=False)
    evicted.join(1)
    evicted.end(1, 75, "evicted")
    evicted.tick(MOMENT_S)
    assert not evicted.commands_of("end")
    pass_s(evicted, evicted.spec.silence_s + 1)
    assert evicted.commands_of("end")[0] == (1, {"command": "end", "again": False})
    assert evicted.outcome is None


def test_a_port_is_not_open_still_once_its_address_could_not_be_read(tmp_path):
    spec = node_spec(tmp_path, nodes=2, index=1)
    RunDir(tmp_path).attempt(0).mkdir(parents=True)
    registry = AgentRegistry(node_spec(tmp_path, nodes=2), 100.0, took_over=False)
    registry.connect(1, 100.0)
    registry.disconnect(1)
    with listen("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        publish_agent(spec, port)
        registry.check(101.0, 5.0, formed=True)
        assert registry.agents[1].port is Port.OPEN
    registry.lose(1)
    (RunDir(tmp_path).attempt(0) / "agent-00001.json").write_text("torn")
    registry.check(102.0, 5.0, formed=True)
    assert registry.ports([1], 102.0, since=102.0) == {}
    publish_agent(spec, port)
    registry.check(103.0, 5.0, formed=True)
    assert registry.ports([1], 103.0, since=102.0) == {1: Port.CLOSED}


def test_an_evicted_node_asks_all_others_in_a_few_turns_whether_they_continue(tmp_path):
    nodes = MOST_PROBES + 3 * MOST_READ
    others = [index for index in range(nodes) if index != 1]
    run = RunDir(tmp_path)
    run.attempt(0).mkdir(parents=True)
    record = GenerationRecord(run.attempt(0))
    record.publish(0, range(nodes))
    record.publish(1, others, gone=[1])
    evicted = Attempt(tmp_path, nodes=nodes, index=1, gone=others, begin=False)
    evicted.join(1)
    evicted.end(1, 75, "evicted")
    with listen("127.0.0.1") as listener:
        publish_agent(node_spec(tmp_path, nodes=nodes, index=nodes - 1), listener.getsockname()[1])
        for _ in range(3):
            evicted.tick(MOMENT_S)
            assert not evicted.commands_of("end"), "the last one may listen"
        evicted.tick(MOMENT_S)
    assert evicted.commands_of("end") == [(1, {"command": "end", "again": True})]
    assert evicted.outcome is None


def test_a_coordinator_whose_ranks_failed_while_it_was_stopped_does_not_end_the_others(tmp_path):
    """They had lost all peers, and got no generation from it; another one has recorded one."""
    attempt = Attempt(tmp_path)
    attempt.record.publish(1, [1, 2], gone=[0])
    with listen("127.0.0.1") as listener:
        for index in (1, 2):
            attempt.lose_agent(index, listener.getsockname()[1])
        failure = failure_record(0, "node0", "a peer is lost", secondary=True)
        attempt.end(0, 1, "failed", failure=failure)
        pass_s(attempt, attempt.spec.silence_s + 3)
    assert attempt.outcome is None
    assert (0, {"command": "end", "again": True}) in attempt.commands_of("end")


def test_an_evicted_coordinator_does_not_end_a_node_that_has_come_back(tmp_path):
    """It was stopped, has connected again, but has not said yet that its worker trains alone."""
    attempt = Attempt(tmp_path, nodes=2)
    with listen("127.0.0.1") as listener:
        attempt.end(0, status=-9)
        attempt.tick(MOMENT_S)
        assert attempt.newest["members"] == [1]
        attempt.lose_agent(1, listener.getsockname()[1])
        pass_s(attempt, attempt.spec.silence_s + 1)
    assert attempt.outcome is None
    assert [agent for agent, _ in attempt.commands_of("end")] == [0]


def test_an_agent_that_was_silent_is_disconnected_and_its_ranks_come_back_after_it(tmp_path):
    attempt = Attempt(tmp_path, replacements=1)
    for seconds, disconnected in ((4.0, []), (2.0, [2])):
        attempt.now += seconds
        for index in (0, 1):
            attempt.coordinator.heard(index)
        attempt.coordinator.tick()
        attempt.commands += attempt.coordinator.commands()
        assert [agent for agent, _ in attempt.commands_of("disconnect")] == disconnected
    attempt.tick(MOMENT_S)
    assert attempt.newest["members"] == [0, 1]
    attempt.join(2)
    attempt.tick(1.0)
    assert not attempt.commands_of("start"), "its worker has not ended yet"
    attempt.end(2, 75, "evicted")
    attempt.tick(1.0)
    assert attempt.commands_of("start") == [(2, {"command": "start", "rank": 2, "incarnation": 1})]


def test_an_agent_may_be_silent_for_longer_while_the_others_cannot_continue_without_it(tmp_path):
    attempt = Attempt(tmp_path, begin=False)
    for index in range(3):
        attempt.join(index)
    for seconds, lost in ((attempt.spec.heartbeat_s - 1.0, []), (2.0, [2])):
        attempt.now += seconds
        for index in (0, 1):
            attempt.coordinator.heard(index)
        attempt.coordinator.tick()
        agents = attempt.coordinator.agents.values()
        assert [agent.index for agent in agents if agent.lost] == lost


def test_a_generation_that_another_coordinator_has_recorded_is_adopted(attempt):
    attempt.record.publish(1, [0, 2], gone=[1])
    attempt.tick(1.0)
    [(_, told)] = attempt.commands_of("tell")[-1:]
    assert told["message"]["members"] == [[0, 0], [2, 2]]
    attempt.end(0, status=-9)
    attempt.tick(MOMENT_S)
    assert (attempt.newest["generation"], attempt.newest["members"]) == (2, [2])


def test_no_number_of_a_member_is_given_twice(tmp_path):
    """A member that has joined and was lost again is in no newest generation."""
    run = RunDir(tmp_path)
    run.attempt(0).mkdir(parents=True)
    record = GenerationRecord(run.attempt(0))
    for number, members in enumerate(([0, 1], [0], [0, 3], [0])):
        record.publish(number, members)
    attempt = Attempt(tmp_path, nodes=2, replacements=4, begin=False)
    attempt.join(0)
    attempt.coordinator.agent_connected(1, [])
    attempt.tick(1.0)
    assert attempt.commands_of("start") == [(1, {"command": "start", "rank": 1, "incarnation": 2})]


def test_a_rank_that_is_killed_after_another_has_finished_fails_the_run(attempt):
    attempt.end(0, final_state="finished")
    attempt.end(1, status=-9)
    attempt.end(2, final_state="finished")
    attempt.tick(GRACE_S)
    assert culprit_of(attempt)["rank"] == 1


def test_a_new_coordinator_knows_how_many_replacements_were_started(tmp_path):
    attempt = Attempt(tmp_path, nodes=2, replacements=1, gone=(), begin=False)
    for index, incarnation in ((0, 0), (1, 1)):
        started = {"event": "started", "rank": index, "incarnation": incarnation}
        begins = {**started, "event": "begins", "code": {"job": "abc"}}
        attempt.coordinator.agent_connected(index, [{"rank": index, "events": [started, begins]}])
    attempt.tick()
    attempt.end(1, status=-9, incarnation=1)
    attempt.tick(MOMENT_S)
    attempt.tick(10.0)
    assert attempt.commands_of("start") == []
    assert mentions(attempt.run.warnings(0, 1).read_text(), "run.max_replacements=1")
