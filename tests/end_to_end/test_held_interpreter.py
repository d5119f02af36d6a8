"""A rank whose code holds Python's interpreter for longer than silence is borne is waited for: its
process lives. Where it waits there for ever, its node ends it, and the others go on.
"""

import pytest

from tests import helpers
from tests.helpers import SMALL

LIVELY = "job._target_=tests.lively_jobs.Lively"
RUN = (
    LIVELY, SMALL, "cluster.nodes=3", "accumulation.reduction=reproducible",
    "accumulation.micro_batch=4", "accumulation.global_batch=48", "train.updates=6",
    "train.evaluate_every=0", "tracker=none", "run.survive=true", "run.max_replacements=0",
)  # fmt: skip


def begun(folder, name, *more):
    run = folder / name
    return run, helpers.begin(*RUN, *more, f"run.dir={run}", "+job.place=forward")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All at once: most of the time they wait."""
    folder = tmp_path_factory.mktemp("held")
    acts = {
        "holds, asleep": ("+job.act=hold", "+job.seconds=8", "+job.ranks=0"),
        "holds for ever": (
            "+job.act=interpreter", "+job.ranks=1", "cluster.heartbeat_timeout_s=8"),
        "works for ever": (
            "+job.act=burn", "+job.seconds=3600", "+job.ranks=1", "cluster.hang_timeout_s=10"),
    }  # fmt: skip
    all_begun = {
        words: begun(folder, str(number), *more) for number, (words, more) in
        enumerate(acts.items())
    }  # fmt: skip
    yield {
        words: (run, *process.communicate(timeout=90)) for words, (run, process) in
        all_begun.items()
    }  # fmt: skip
    for _, process in all_begun.values():
        process.kill()


@pytest.mark.timeout(120)
def test_a_rank_that_holds_the_interpreter_for_a_while_is_waited_for(runs):
    run, output, _ = runs["holds, asleep"]
    assert helpers.result(run)["state"] == "finished", output
    assert "survived" not in helpers.result(run), output
    assert "rank 0 has said nothing for" in " ".join(output.split())
    assert not helpers.processes_of(run)


@pytest.mark.timeout(120)
def test_a_rank_that_computes_there_for_ever_is_ended_and_survived(runs):
    run, output, _ = runs["works for ever"]
    found = helpers.result(run)
    assert found["state"] == "finished", output
    assert [note["gone"] for note in found["survived"]] == [[1]]
    assert not helpers.processes_of(run)


@pytest.mark.timeout(120)
def test_a_rank_that_waits_there_for_ever_is_ended_by_its_node_and_survived(runs):
    run, output, _ = runs["holds for ever"]
    found = helpers.result(run)
    assert found["state"] == "finished", output
    others = [helpers.result(other)["weights_sha256"] for other, *_ in runs.values()]
    assert others == [found["weights_sha256"]] * len(runs)
    assert [note["gone"] for note in found["survived"]] == [[1]]
    assert "rank 1: it gave no sign of life for 8 s" in " ".join(output.split())
    assert not helpers.processes_of(run)
