"""Ranks compute each other's leaves again: who is named, what is refused, and no trace."""

import itertools
import json

import pytest

from orchestrator.notify import messages
from orchestrator.rundir.folder import RunDir
from orchestrator.sentinel.judgement import (
    chosen_leaf,
    differing_owners,
    is_due,
    shift_of,
    wrong_ranks,
)
from tests.helpers import call, records, result, verb

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

COMMON = (
    "train.evaluate_every=0",
    "train.checkpoint_every=0",
    "tracker=none",
    "cluster.nodes=1",
    "accumulation.global_batch=24",
    "accumulation.steps=null",
    "accumulation.micro_batch=4",
    "accumulation.reduction=reproducible",
    "train.updates=8",
)
JOBS = "job._target_=tests.sentinel.jobs"
EVERY = "accumulation.sentinel_every"


def train(run, job, ranks, *words, code=0):
    shape = (f"cluster.ranks_per_node={ranks}", f"run.dir={run}")
    return call(f"{JOBS}.{job}", *COMMON, *shape, *words, code=code)


def told(process):
    return " ".join((process.stdout + process.stderr).split())


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def bits(run):
    """Return what a run has recorded of its updates that depends on every bit."""
    names = ("gradient_digest", "loss", "gradient_norm", "metrics")
    return [[line[name] for name in names] for line in records(run)]


# ------------------------------------------------------------------ choices


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_in_turn_each_rank_is_checked_by_all_others(ranks):
    due = [update for update in range(7 * (ranks - 1)) if is_due(update, 7)]
    pairs = {
        (rank, (rank + shift_of(update, 7, ranks)) % ranks)
        for update in due
        for rank in range(ranks)
    }
    assert pairs == set(itertools.permutations(range(ranks), 2))


def test_all_leaves_of_a_rank_are_chosen_in_time():
    assert {chosen_leaf(0, update, 1, 5) for update in range(100)} == set(range(5))
    assert chosen_leaf(0, 3, 1, 0) is None


@pytest.mark.parametrize("wrong", range(4))
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_rank_that_always_errs_is_found_by_any_check(wrong, shift):
    own = [10 + rank + 100 * (rank == wrong) for rank in range(4)]
    checked = [10 + (rank - shift) % 4 + 100 * (rank == wrong) for rank in range(4)]
    differing = differing_owners(own, checked, shift)
    assert set(differing) == {wrong, (wrong - shift) % 4}
    for owner in differing:
        checker = (owner + shift) % 4
        repeats = [10 + owner + 100 * (rank == wrong) for rank in range(4)]
        assert wrong_ranks(owner, own[owner], checker, checked[checker], repeats) == [wrong]


# ------------------------------------------------------------------ naming


@pytest.mark.parametrize("wrong", range(3))
def test_wrong_rank_is_found_within_the_interval(tmp_path, wrong):
    run = tmp_path / "run"
    train(run, "Wrong", 3, f"+job.rank={wrong}", "+job.since=2", f"{EVERY}=4")
    sentence = (
        f"rank {wrong} on node0 computed wrongly in update 3: the bits of micro-step N are not "
        "those that most computations give"
    )
    before, after = sentence.split("N")
    warnings = [line.get("warnings", ()) for line in lines_of(run)]
    [warning] = [text for texts in warnings for text in texts if "wrongly" in text]
    assert warning.startswith(before)
    assert warning.endswith(after)
    assert before in " ".join(verb("status", run, code=0).stdout.split())
    texts = {name: (event, text) for name, event, text in messages(RunDir(run))}
    assert texts[f"sentinel-0-{wrong}"][0] == "sentinel"
    assert texts[f"sentinel-0-{wrong}"][1].endswith(after)  # of a later update


def test_of_two_ranks_an_error_that_does_not_last_is_named(tmp_path):
    run = tmp_path / "run"
    words = ("+job.rank=1", "+job.lasting=false", "+job.since=1", "accumulation.global_batch=8")
    done = train(run, "Wrong", 2, *words, f"{EVERY}=3")
    assert "rank 1 on node0 computed wrongly in update 2: the bits of micro-step 1" in told(done)


def test_of_two_ranks_an_error_that_lasts_is_undecided(tmp_path):
    done = train(tmp_path / "run", "Wrong", 2, "+job.rank=1", "+job.since=1", f"{EVERY}=3")
    assert "rank 0 on node0 and rank 1 on node0 differ in update 2" in told(done)
    assert "undecided, as it takes 3 ranks" in told(done)
    assert "computed wrongly" not in told(done)


def test_a_stop_comes_before_the_update_and_names_the_rank_as_culprit(tmp_path):
    run = tmp_path / "run"
    words = ("+job.rank=2", "+job.since=2", f"{EVERY}=4", "accumulation.sentinel=stop")
    train(run, "Wrong", 3, *words, code=1)
    ended = result(run)
    assert (ended["state"], ended["culprit"]["rank"], ended["updates"]) == ("failed", 2, 3)
    assert "rank 2 on node0 computed wrongly in update 3" in ended["culprit"]["cause"]
    assert ended["culprit"]["cause"].endswith("The update was not made")


@pytest.mark.parametrize("wrong", [0, 2])
def test_the_others_continue_without_an_excluded_rank_to_the_bits_without_its_error(
    tmp_path, wrong
):
    runs = [tmp_path / "run", tmp_path / "right"]
    words = (f"+job.rank={wrong}", "+job.since=3", f"{EVERY}=4", "accumulation.sentinel=exclude")
    done = train(runs[0], "Wrong", 3, *words, "run.survive=true")
    assert f"rank {wrong} on node0 computed wrongly in update 3" in told(done)
    changes = [line for line in lines_of(runs[0]) if "survived" in line]
    assert [(line["update"], line["survived"]["gone"]) for line in changes] == [(3, [wrong])]
    assert not [line for line in lines_of(runs[0]) if line.get("joined")]  # nothing replaces it
    train(runs[1], "Wrong", 2)
    assert bits(runs[0]) == bits(runs[1])
    assert result(runs[0])["weights_sha256"] == result(runs[1])["weights_sha256"]


# ------------------------------------------------------------------ no trace


@pytest.mark.parametrize(("ranks", "width"), [(2, 16), (3, 9000)])
def test_updates_and_all_state_are_those_of_a_run_without_it(tmp_path, ranks, width):
    runs = [tmp_path / "with", tmp_path / "without"]
    for run, words in zip(runs, [(f"{EVERY}=1",), ()], strict=True):
        more = (f"+job.width={width}", "train.precision=bfloat16", "optimizer.weight_decay=0.1")
        done = train(run, "Stateful", ranks, *words, *more, "accumulation.global_batch=12")
        assert "computed wrongly" not in told(done)
        assert "differ in update" not in told(done)
    assert bits(runs[0]) == bits(runs[1])
    assert result(runs[0])["weights_sha256"] == result(runs[1])["weights_sha256"]
    for rank in range(ranks):
        states = [(run / f"state-{rank}.jsonl").read_text() for run in runs]
        assert states[0] == states[1]
        assert len(states[0].splitlines()) == 8
    checks = [line["collectives"] for line in records(runs[0])[1:]]
    without = [line["collectives"] for line in records(runs[1])[1:]]
    assert checks == [count + 1 for count in without]


def test_ranks_without_leaves_and_loader_workers_raise_no_alarm(tmp_path):
    words = ("accumulation.global_batch=8", "+job.dropout=0.5", "train.loader_workers=1")
    done = train(tmp_path / "run", "Wrong", 3, *words, f"{EVERY}=1")
    assert len(records(tmp_path / "run")) == 8
    assert "computed wrongly" not in told(done)
    assert "differ in update" not in told(done)


def test_checks_continue_when_a_rank_is_lost(tmp_path):
    run = tmp_path / "run"
    words = ("+job.fault=kill", "+job.fault_rank=1", "run.survive=true", "run.max_replacements=0")
    done = train(run, "Wrong", 4, *words, "+job.rank=3", "+job.since=6", f"{EVERY}=1")
    assert len({line["update"] for line in records(run)}) == 8
    assert "rank 3 on node0 computed wrongly in update 6" in told(done)


def test_a_replay_in_one_process_leaves_it_out_and_a_resume_may_change_it(tmp_path):
    run = tmp_path / "run"
    train(run, "Wrong", 2, f"{EVERY}=2", "train.updates=4", "train.checkpoint_every=2")
    assert json.loads(verb("replay", run, "--update", 3, "--json", code=0).stdout)["update"] == 3
    verb("resume", run, f"{EVERY}=3", "train.updates=6", code=0)
    assert len(records(run)) == 6


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("accumulation.reduction=fast", f"{EVERY}=9"), "add accumulation.reduction=reproducible"),
        (("cluster.ranks_per_node=1", f"{EVERY}=9"), "needs another rank"),
        (("accumulation.sentinel=stop",), "has no effect without accumulation.sentinel_every"),
        (("accumulation.sentinel=exclude", f"{EVERY}=9"), "add run.survive=true"),
        (("run.callbacks=[sentinel]",), "is what accumulation.sentinel_every=200 adds"),
        (("job._target_=jobs.contrastive.Contrastive", f"{EVERY}=9"), "with embed()"),
    ],
)
def test_what_cannot_be_checked_is_refused_before_the_start(tmp_path, words, sentence):
    shape = ("cluster.ranks_per_node=2", f"run.dir={tmp_path / 'run'}")
    assert sentence in told(call(f"{JOBS}.Wrong", *COMMON, *shape, *words, code=2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("job", "sentence"),
    [
        ("sentinel.jobs.Spectral", "the same rank computes twice has other bits the second time"),
        ("tiny_job.Unrepeatable", "the same rank computes twice has other bits the second time"),
        ("sentinel.jobs.Keeping", "loss() changes Keeping.seen, which cannot be restored"),
        ("tiny_job.Talking", "not available with talks_in_window = True"),
    ],
)
def test_a_job_that_cannot_be_computed_twice_is_refused_at_the_start(tmp_path, job, sentence):
    run = tmp_path / "run"
    words = ("cluster.ranks_per_node=2", f"{EVERY}=200", f"run.dir={run}")
    assert sentence in told(call(f"job._target_=tests.{job}", *COMMON, *words, code=1))
    assert not records(run)
