"""Root cause of ranks that leave without an exception or hang while the others wait. A rank that is
only slow is left alone.
"""

import re

import pytest

from tests import helpers
from tests.helpers import LIMIT_S, SMALL

pytestmark = [pytest.mark.whole_runs, pytest.mark.long]

LIVELY = "job._target_=tests.tiny_job.Lively"
COMMON = (
    "tracker=none",
    "train.updates=4",
    "accumulation.global_batch=40",
    "accumulation.steps=2",
    "train.evaluate_every=2",
    "run.survive=false",
)
WAIT = ("cluster.collective_timeout_s=8", "cluster.hang_timeout_s=600")
HANG = ("cluster.heartbeat_timeout_s=3", "cluster.hang_timeout_s=8")
NO_EXIT_REPORT = r"exited with code {} before its training had ended"
WAITED = r".*; rank {} waited for it \d+ s at the boundary of update \d, for {}"
BUCKET = r"bucket 1 of 1 of the gradient, all_reduce_sum"
HANGS = r"it hangs: it has been at {} for \d+ s {}"
SILENT = (
    r"it hangs: it has sent nothing for \d+ s without using a processor \(cluster.hang_timeout_s\)"
)

# act, where, in which ranks, settings -> the culprit (None: any), its cause, a line of its stack
ROWS = {
    "every rank leaves before the group forms": (
        "exit0",
        "init",
        "all",
        (),
        None,
        NO_EXIT_REPORT.format(0),
        "",
    ),
    "a rank hangs in its loader": (
        "sleep",
        "loader",
        1,
        HANG,
        1,
        HANGS.format("micro-step .*", r"without using.*; in <lambda> \(.*acting_job.py, line")
        + WAITED.format(0, BUCKET),
        "__getitem__",
    ),
    "a process that fetches samples hangs": (
        "sleep",
        "loader",
        1,
        ("train.loader_workers=1", *HANG),
        1,
        HANGS.format(
            "micro-step .*",
            r"without using.*; in its DataLoader, which waits for samples"
            r" \(.*; its process \d+ is in <lambda> \(.*acting_job.py, line \d+",
        ),
        "",
    ),
    "a rank is stopped": (
        "stop",
        "forward",
        1,
        ("cluster.heartbeat_timeout_s=3",),
        1,
        r"it was frozen \(SIGSTOP\) for 3 s .*; it was last seen at .* update \d.*, in .*line \d+\)"
        + WAITED.format(0, BUCKET),
        "",
    ),
    "a rank sleeps in the kernel with the interpreter in its hands": (
        "kernel",
        "forward",
        1,
        ("cluster.heartbeat_timeout_s=3", "cluster.hang_timeout_s=6"),
        1,
        SILENT
        + r", asleep in kernel_clone: a disk.*; it is in _sleep_in_the_kernel \(.*job.py"
        + WAITED.format(0, BUCKET),
        "in loss",
    ),
    "two ranks wait for each other": (
        "other",
        "forward",
        1,
        WAIT,
        0,
        r"it hangs: all ranks have waited for each other for \d+ s, so no rank was behind: rank 0 "
        r"waited \d+ s at the boundary .*, for " + BUCKET + r"; rank 1 waited \d+ s at micro-step "
        r".*, for barrier\. A link between",
        "",
    ),
    "a rank is deadlocked with the interpreter in its hands": (
        "interpreter",
        "forward",
        1,
        ("cluster.heartbeat_timeout_s=3", "cluster.hang_timeout_s=8"),
        1,
        SILENT
        + r"; its code holds Python's interpreter; it is in .*\(.*acting_job.py, line \d+"
        + WAITED.format(0, BUCKET),
        "in loss",
    ),
    "a rank sleeps while others wait, who are not to wait so long": (
        "sleep",
        "forward",
        1,
        WAIT,
        1,
        r"the others waited in vain \(cluster.collective_timeout_s=8\): it was still at micro-step "
        r".*\(.*acting_job.py, line \d+\)" + WAITED.format(0, BUCKET),
        "in loss",
    ),
}
IMPATIENT = (
    "cluster.heartbeat_timeout_s=2",
    "cluster.hang_timeout_s=4",
    "cluster.rendezvous_timeout_s=4",
    "cluster.collective_timeout_s=4",
)
SLOW = {
    "a long evaluation that uses no processor": (
        "slow",
        "evaluate",
        ("+job.seconds=12", "train.evaluate_every=0", *IMPATIENT),
        "it has stood at what follows update 4 (records, evaluation, checkpoint) for",
    ),
    "a job that is prepared for long": (
        "slow",
        "init",
        ("+job.seconds=15", *IMPATIENT),
        "(it prepares its job and data)",
    ),
    "a rank holds the interpreter for a while": (
        "hold",
        "forward",
        ("+job.seconds=8", "cluster.heartbeat_timeout_s=2", "run.survive=true"),
        "it sends nothing: its code holds Python's interpreter",
    ),
}
"""The same of rank 0, which continues, and what is said meanwhile."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All of them at once: most of the time they wait."""
    folder = tmp_path_factory.mktemp("lively")
    begun = {}
    rows = ROWS | {words: (act, place, 0, more) for words, (act, place, more, _) in SLOW.items()}
    for number, (words, row) in enumerate(rows.items()):
        act, place, ranks, more, *_ = row
        run = folder / str(number)
        arguments = (f"+job.act={act}", f"+job.place={place}", f"+job.ranks={ranks}", *more)
        begun[words] = run, helpers.begin(LIVELY, SMALL, *COMMON, *arguments, f"run.dir={run}")
    yield {
        words: (run, *process.communicate(timeout=LIMIT_S))
        for words, (run, process) in begun.items()
    }
    for _, process in begun.values():
        process.kill()


@pytest.mark.parametrize("words", ROWS)
def test_the_rank_that_left_or_hangs_is_the_culprit(runs, words):
    *_, rank, cause, line = ROWS[words]
    run, output, _ = runs[words]
    ended = helpers.result(run)
    assert ended["state"] == "failed", output
    culprit = ended["culprit"]
    assert rank in (None, culprit["rank"]), output
    assert re.match(cause, culprit["cause"]), culprit["cause"]
    assert not line or any(line in said for said in culprit["log_tail"])
    assert not helpers.processes_of(run)


@pytest.mark.parametrize("words", SLOW)
def test_a_rank_that_is_only_slow_is_reported_and_waited_for(runs, words):
    run, output, _ = runs[words]
    found = helpers.result(run)
    assert (found["state"], "survived" in found) == ("finished", False), output
    assert SLOW[words][-1] in " ".join(output.split())
    if words == "a long evaluation that uses no processor":
        assert "in _at" in (run / "logs" / "rank-00000.log").read_text()
