"""The root cause of a failure from few facts."""

import pytest

from orchestrator.agent.liveness import RankPosition
from orchestrator.agent.root_cause import (
    NO_EXIT_REPORT,
    TAIL_BYTES,
    AbnormalEnd,
    Straggler,
    find_root_cause,
    tail,
)
from orchestrator.errors import describe_status
from tests.run_folders import write_failure

pytestmark = pytest.mark.whole_runs


def ended(node, rank, status, time=0.0, why=""):
    index = int(node.removeprefix("node"))
    return AbnormalEnd(time=time, node=node, index=index, rank=rank, status=status, why=why)


@pytest.mark.parametrize(
    ("log", "status", "cause"),
    [
        ("update 1\nerror: the scheduler ended\n", 1, "the scheduler ended"),
        ("error: long ago\nupdate 2\n", 1, describe_status(1)),
        ("error: then somebody killed it\n", -9, describe_status(-9)),
        ("", 5, describe_status(5)),
        ("", -99, describe_status(-99)),  # which has no name
    ],
)
def test_a_rank_that_wrote_no_failure_is_heard_by_its_logs_last_word(run, log, status, cause):
    run.rank_log(1).write_text(log)
    culprit = find_root_cause(run, run.failures(0), [ended("node1", 1, status)])
    assert (culprit.rank, culprit.node, culprit.cause) == (1, "node1", cause)
    assert culprit.log_tail == tuple(log.splitlines())


@pytest.mark.parametrize(
    ("failures", "blamed"),
    [
        ({0: (5.0, True), 3: (4.0, False), 1: (2.0, False), 2: (1.0, True)}, 1),
        ({0: (5.0, False), 1: (2.0, False)}, 0),  # its end was seen first
        ({0: (5.0, True), 1: (2.0, True)}, 0),
    ],
)
def test_the_first_primary_failure_is_blamed_or_that_of_the_end_seen(begun, failures, blamed):
    for rank, (time, secondary) in failures.items():
        write_failure(begun, rank, f"ValueError: {rank}", time=time, secondary=secondary)
    culprit = find_root_cause(begun, begun.failures(0), [ended("node0", 0, 1)])
    assert (culprit.rank, culprit.node) == (blamed, f"node{blamed}")
    assert culprit.cause == f"ValueError: {blamed}"


def test_a_rank_that_a_watchdog_of_nccl_ended_has_only_waited(begun):
    begun.rank_log(0).write_text(
        "update 3\n[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    )
    ends = [ended("node0", 0, -6, 1.0)]
    assert find_root_cause(begun, [], ends, [straggler(1, 90.0)]).rank == 1
    begun.rank_log(0).write_text("free(): invalid pointer\n")
    assert find_root_cause(begun, [], ends, [straggler(1, 90.0)]).rank == 0


def test_a_rank_that_was_killed_is_blamed_though_its_logs_last_line_is_an_error(begun):
    write_failure(begun, 0, "PeerLost: rank 0 lost a peer", secondary=True)
    begun.rank_log(1).write_text("update 3\nerror: shard 3 cannot be read; trying another\n")
    for status in (-9, -6):
        ends = [ended("node0", 0, 1, 1.0), ended("node1", 1, status, 2.0)]
        culprit = find_root_cause(begun, begun.failures(0), ends, [straggler(2, 0.5)])
        assert (culprit.rank, culprit.cause) == (1, describe_status(status))


def test_a_node_that_went_away_is_named_without_a_rank(begun):
    begun.node_log("node1").write_text("last\n")
    culprit = find_root_cause(
        begun,
        begun.failures(0),
        [ended("node1", None, -9, why="its agent is gone")],
    )
    assert (culprit.rank, culprit.node, culprit.log_tail) == (None, "node1", ("last",))
    assert culprit.cause == "its agent is gone"


@pytest.mark.parametrize("status", [0, 3, 7, -9, -15])
@pytest.mark.parametrize("later", [0, 1, 2])
def test_who_left_without_a_word_is_named_and_never_who_waited(begun, status, later):
    """The one that waited may be seen first, and may have written of it first."""
    write_failure(begun, 0, "PeerLost: rank 0 lost a peer", secondary=True)
    ends = [ended("node0", 0, 1, 1.0), ended("node1", 1, status, later)]
    culprit = find_root_cause(begun, begun.failures(0), ends, [straggler(2, 0.5)])
    assert culprit.rank == 1
    if status in (0, 3):
        assert culprit.cause == describe_status(status) + NO_EXIT_REPORT


AT = "at micro-step 1 of 2 of update 3, in loss (job.py, line 3)"


def straggler(rank, stood_s):
    seen = RankPosition(at=AT, stood_s=stood_s, stack=(("job.py", 3, "loss"),))
    return Straggler(rank=rank, node=f"node{rank}", seen=seen)


def test_where_all_that_ended_only_waited_it_is_who_stood_still_first(begun):
    write_failure(begun, 0, "PeerLost: timed out", secondary=True)
    begun.rank_log(3).write_text(
        "update 1\nerror: rank 1 went away\n"
    )  # stuck in a framework, and told so
    ends = [ended("node0", 0, 1, 1.0), ended("node3", 3, 1, 2.0)]
    culprit = find_root_cause(
        begun, begun.failures(0), ends, [straggler(2, 7.0), straggler(1, 8.0)]
    )
    assert (culprit.rank, culprit.log_tail) == (1, ('  File "job.py", line 3, in loss',))
    assert (culprit.hangs, culprit.cause.endswith(AT)) == (True, True), culprit.cause
    assert find_root_cause(begun, begun.failures(0), ends).rank == 0


def test_the_first_in_time_is_blamed_whatever_the_order_in_which_they_are_told(begun):
    ends = [ended("node2", 2, -11, 9.0), ended("node1", 1, 7, 3.0), ended("node3", 3, 5, 4.0)]
    culprit = find_root_cause(begun, [], ends)
    assert (culprit.rank, culprit.cause) == (1, describe_status(7))


def test_a_failure_is_told_with_all_that_the_rank_said_and_the_end_of_its_log(begun):
    failure = {
        "rank": 2,
        "node": "node9",
        "cause": "no such file",
        "time": 1.0,
        "usage": True,
        "secondary": False,
    }
    begun.rank_log(2).write_text("one\ntwo\n")
    culprit = find_root_cause(begun, [failure], [ended("node9", 2, 1)])
    assert (culprit.rank, culprit.node, culprit.cause) == (2, "node9", "no such file")
    assert (culprit.usage, culprit.log_tail) == (True, ("one", "two"))


def test_a_rank_without_a_log_of_its_own_is_heard_in_its_nodes(begun):
    begun.node_log("node1").write_text("error: ImportError\n")
    culprit = find_root_cause(begun, [], [ended("node1", 1, 1)])
    assert (culprit.cause, culprit.log_tail) == ("ImportError", ("error: ImportError",))


def test_of_a_long_log_the_last_lines_are_told_whatever_bytes_they_hold(tmp_path):
    log = tmp_path / "log"
    assert tail(log) == ()
    log.write_bytes(b"x" * TAIL_BYTES + b"\n" + b"".join(b"%d\n" % n for n in range(40)) + b"\xff")
    assert tail(log) == (*(str(n) for n in range(11, 40)), "\ufffd")
    assert tail(log, 2) == ("39", "\ufffd")
    log.write_bytes(b"y" * (TAIL_BYTES + 9))
    assert len(tail(log)[0]) == TAIL_BYTES


def test_who_stood_still_without_a_stack_is_told_by_its_log(begun):
    write_failure(begun, 0, "PeerLost: timed out", secondary=True)
    begun.rank_log(1).write_text("epoch 1\n")
    seen = RankPosition(at="at update 3, in loss", stood_s=1.0)
    behind = Straggler(rank=1, node="n1", seen=seen)
    culprit = find_root_cause(begun, begun.failures(0), [ended("node0", 0, 1, 1.0)], [behind])
    assert (culprit.rank, culprit.node, culprit.log_tail) == (1, "n1", ("epoch 1",))
    assert (culprit.hangs, culprit.cause.endswith(seen.at)) == (True, True), culprit.cause
