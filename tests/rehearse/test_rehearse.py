"""Rehearsals: drawn faults, refusals, and runs that end otherwise than undisturbed."""

import json
import signal
import subprocess
import time
from dataclasses import replace
from itertools import islice

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.command_line import CommandLine
from orchestrator.errors import UsageError
from orchestrator.rehearse.faults import (
    FREEZE_NODE,
    KILL_NODE,
    KILL_RANK,
    KILL_TWO,
    ON_SLURM,
    PER_RUN,
    SIMULATED,
    Injected,
    RankProcess,
    choose,
    draws,
    inject,
)
from orchestrator.rehearse.rehearsal import (
    LEAST_UPDATES,
    FaultOutcome,
    Row,
    compare,
    plan_rehearsal,
)
from orchestrator.rehearse.rehearsed_run import SimulatedRun
from orchestrator.rundir.files import write_json
from tests import helpers
from tests.docs.json_fields import Fields, printed
from tests.helpers import TINY, until

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

SEED = 1037  # these four faults, in one run
SMALL = (TINY, "accumulation.global_batch=48", "accumulation.micro_batch=4")


# ------------------------------------------------------------------ drawn faults


@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 40),
    updates=st.integers(LEAST_UPDATES, 500),
    kinds=st.sampled_from([SIMULATED, ON_SLURM, SIMULATED[:1]]),
)
def test_a_seed_draws_the_same_faults_of_all_kinds_in_parts_of_the_run(seed, count, updates, kinds):
    drawn = list(islice(draws(seed, kinds), count))
    assert drawn == list(islice(draws(seed, kinds), count + 7))[:count]
    for start in range(0, count - len(kinds) + 1, len(kinds)):
        assert {fault.kind for fault in drawn[start : start + len(kinds)]} == set(kinds)
    for start in range(0, count, PER_RUN):
        of_run = [fault.update(updates) for fault in drawn[start : start + PER_RUN]]
        assert of_run == sorted(set(of_run))
        assert of_run[0] > 0
        assert of_run[-1] < updates - 1
    assert all(choose(range(n), fault.target) in range(n) for fault in drawn for n in (1, 2, 7))


def planned(overrides, *more, **flags):
    return plan_rehearsal(CommandLine(overrides=overrides, **flags), *more)


# ------------------------------------------------------------------ requests


@pytest.mark.parametrize(
    ("given", "asked", "said"),
    [
        (SMALL, (1, ON_SLURM[-1:]), "no such fault here; there are kill a rank, kill a node"),
        ((*SMALL, "cluster.nodes=1"), (1, ["freeze a node"]), "no other node would notice"),
        (SMALL, (0,), "--faults 0: there can be 1 to"),
        (SMALL, (10**6,), "there can be 1 to"),
        ((*SMALL, "train.updates=5"), (1,), f"try train.updates={LEAST_UPDATES}"),
        ((*SMALL, "run.dir=here"), (1,), "use --into FOLDER"),
        ((*SMALL, "+cluster=slurm", "cluster.slurm_conf=/no.conf"), (1,), "there is no such file"),
        ((*SMALL, "+cluster=slurm", "cluster.allocation=current"), (1,), "current out"),
        (("job=program", "job.command=[train.py]"), (1,), "a program keeps"),
        ((*SMALL, "train.seed=1,2"), (1,), "sweep"),
        ((*SMALL, "cluster.nodse=2"), (1,), "nodes"),
        ((*SMALL, "run.survive=true", "transport=nccl"), (1,), "transport=gloo"),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_what_cannot_be_rehearsed_is_refused(given, asked, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        planned(given, *asked)
    assert not list(tmp_path.iterdir())


def test_all_runs_take_the_users_own_files(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\ntrain: {seed: 7}\n")
    found = planned(SMALL, 1, config_dir=str(tmp_path), config_name="mine")
    assert found.config.train.seed == 7
    assert found.flags == ("--config-dir", str(tmp_path), "--config-name", "mine")


def test_impossible_faults_are_left_out():
    found = planned(SMALL, 1)
    assert (found.config.run.survive, found.to_the_bit, found.notes) == (True, True, ())
    found = planned((*SMALL, "engine.shard_optimizer=true"), 1)
    assert (found.config.run.survive, found.to_the_bit) == (True, False)
    assert "accumulation.reduction=fast rounds otherwise" in found.equality
    assert "without accumulation.reduction=reproducible" in found.notes[0]
    fixed = planned((*SMALL, "run.survive=false", "accumulation.reduction=fast"), 1, SIMULATED[2:4])
    assert (fixed.kinds, fixed.to_the_bit) == (SIMULATED[2:4], True)
    nodes = replace(fixed.config.cluster, nodes={"min": 2, "max": 4})
    elastic = replace(fixed, config=replace(fixed.config, cluster=nodes))
    assert not elastic.to_the_bit, "a restart may take other nodes, and fast rounds otherwise then"


# ------------------------------------------------------------------ what comes of it


def line(update, attempt=0, **more):
    said = {"update": update, "attempt": attempt, "loss": 1.0 / (1 + update), "samples": 48}
    return said | {"weight": 48.0, "update_s": 0.1, "time": float(update)} | more


@pytest.fixture(scope="module")
def small():
    return planned((*SMALL, "train.updates=20"), 1)


@pytest.mark.parametrize(
    ("more", "how"),
    [({}, "went on"), ({"survived": {"gone": [3], "ranks": 3}}, "survived"), (None, "")],
    ids=["no rank is lost", "one of two is lost", "nothing follows"],
)
def test_a_harm_that_costs_less_than_was_meant_is_no_end(tmp_path, small, more, how):
    run = SimulatedRun(tmp_path / "run-001", small)
    run.run.path.mkdir()
    write_json(run.run.result, {"state": "finished", "updates": 20})
    run.records += [line(n) for n in range(5)]
    injected = Injected(text="kill ranks 2 and 3", gone=frozenset({2, 3}))
    following = FaultOutcome(run, KILL_TWO, injected)
    following.row.noticed_s = 0.1
    change = [{"update": 5, "attempt": 0, "time": 5.0, **more}] if more else []
    run.records += [] if more is None else [*change, line(5), line(6)]
    assert not following.recovered(False)
    following.finish()
    assert following.row.how == how
    assert (following.row.recovered_s is None) == (not how)


def test_an_update_that_ended_before_a_fault_is_not_the_next_one(tmp_path, small):
    run = SimulatedRun(tmp_path / "run-001", small)
    following = FaultOutcome(run, FREEZE_NODE, Injected(text="only one was left"))
    following.row.noticed_s = 0.1
    run.records += [line(5)]
    assert not following.recovered(False)
    run.records += [line(6, time=time.time() + 1)]
    assert following.recovered(False)
    assert (following.row.how, following.row.recovered_s > 0) == ("went on", True)


def beside(tmp_path, small, ours, **end):
    """Return a rehearsal's verdict on a run of these lines that was disturbed in update 5."""
    runs = []
    for name, records in (("undisturbed", [line(n) for n in range(20)]), ("run-001", ours)):
        run = SimulatedRun(tmp_path / name, small)
        run.run.path.mkdir()
        (tmp_path / f"{name}.log").write_text("")
        ended = {"state": "finished", "updates": 20, "samples": 960, "weights_sha256": "a"}
        write_json(run.run.result, ended | (end if name == "run-001" else {}))
        run.records = records
        runs.append(run)
    row = Row(kind="", fault="kill rank 1", run="run-001", update=5)
    return compare([row], runs[1], runs[0], small), row


AS_IT_WAS = [line(n) for n in range(20)]
CASES = {
    "equal": (AS_IT_WAS, {}, ""),
    "redone": ([*AS_IT_WAS[:7], *(line(n, 1) for n in range(5, 20))], {}, ""),
    "another loss": ([*AS_IT_WAS[:6], line(6, loss=0.142), *AS_IT_WAS[7:]], {}, "it differs"),
    "a sample lost": ([*AS_IT_WAS[:6], line(6, samples=47), *AS_IT_WAS[7:]], {}, "it differs"),
    "an update lost": ([*AS_IT_WAS[:6], *AS_IT_WAS[7:]], {}, "it differs"),
    "other weights": (AS_IT_WAS, {"weights_sha256": "b"}, "weights_sha256 differ"),
    "no end": (AS_IT_WAS, {"state": "failed"}, "it is failed"),
}


@pytest.mark.parametrize("case", CASES)
def test_whatever_is_otherwise_than_undisturbed_is_seen(case, tmp_path, small):
    ours, end, said = CASES[case]
    wrong, row = beside(tmp_path, small, ours, **end)
    assert row.equal is not bool(said)
    assert bool(wrong) is bool(said)
    assert said in "".join(wrong)
    assert row.samples_lost == {"a sample lost": 1, "an update lost": 48}.get(case, 0)


def test_a_rehearsal_of_four_faults_ends_with_the_undisturbed_bits(tmp_path):
    done = helpers.verb(
        "rehearse",
        *SMALL,
        "job.pause_s=0.06",
        "cluster.nodes=2",
        "cluster.ranks_per_node=2",
        "train.updates=24",
        "--faults",
        4,
        "--seed",
        SEED,
        "--into",
        tmp_path / "it's [of], ü",
        "--json",
        code=0,
    )
    found = json.loads(done.stdout)
    assert not found["wrong"]
    assert [(row["kind"], row["how"]) for row in found["rows"]] == [
        ("kill a rank", "survived"),
        ("stop, resume", "resume"),
        ("freeze a node", "survived"),
        ("kill the launcher", "resume"),
    ]
    assert all(row["equal"] and not row["samples_lost"] for row in found["rows"])
    assert all(row["noticed_s"] is not None for row in found["rows"])
    assert not helpers.processes_of(tmp_path)


# ------------------------------------------------------------------ Faults in processes


@pytest.fixture
def processes():
    """Four processes: an agent and its rank on each of two nodes."""
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(4)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def ranks_of(processes):
    pids = [process.pid for process in processes]
    return {3: RankProcess(pids[1], pids[0], "n0"), 5: RankProcess(pids[3], pids[2], "n1")}


def test_a_frozen_node_stops_with_its_agent(processes):
    injected = inject(FREEZE_NODE, 0.9, ranks_of(processes))
    assert (injected.text, injected.gone) == ("freeze n1", {5})
    stopped = [psutil.Process(process.pid) for process in processes[2:]]
    until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in stopped), 30, "their stop")


@pytest.mark.parametrize(
    ("kind", "text", "gone", "killed"),
    [
        (KILL_RANK, "kill rank 3", {3}, [1]),
        (KILL_TWO, "kill ranks 3 and 5", {3, 5}, [1, 3]),
        (KILL_NODE, "kill n0", {3}, [0, 1]),
    ],
)
def test_a_kill_hits_the_chosen_processes_alone(processes, kind, text, gone, killed):
    injected = inject(kind, 0.0, ranks_of(processes))
    assert (injected.text, injected.gone) == (text, gone)
    for number in killed:
        assert processes[number].wait(30) == -signal.SIGKILL
    assert all(processes[n].poll() is None for n in range(4) if n not in killed)


def test_faults_in_processes_that_have_ended_are_none(processes):
    ranks = ranks_of(processes)
    for process in processes:
        process.kill()
        process.wait()
    inject(KILL_NODE, 0.0, ranks)
    assert inject(KILL_RANK, 0.0, {}).text == "kill a rank: none was left"


def test_json_has_the_documented_fields(tmp_path):
    fields = Fields("rehearse")
    fields.check(printed("rehearse", *SMALL, "--faults", 1, cwd=tmp_path))
    assert fields.unseen == set()
