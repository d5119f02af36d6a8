"""Groups over MCCL: how ranks meet, and what three real processes compute.

Rendezvous knows no framework, so its ranks are threads here.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest

from orchestrator.engine.mindspore.group import device_of_rank, form_group, variables
from orchestrator.engine.mindspore.rendezvous import (
    Scheduler,
    await_verdict,
    decide,
    leave_together,
)
from orchestrator.errors import (
    PeerLost,
    RanksMissing,
    RendezvousError,
    StopRequested,
    TransportError,
)
from tests.engine.mindspore.program import checks, spec
from tests.helpers import LIMIT_S, ROOT, alive, environment, until
from tests.refusals import mentions, refused

pytestmark = pytest.mark.long


@pytest.mark.timeout(600)  # it compiles, which takes minutes if the machine is busy
def test_every_check_holds_on_every_rank_and_the_scheduler_ends_with_the_group(tmp_path):
    def be(rank):
        words = ("-m", "tests.engine.mindspore.program", str(tmp_path), str(rank), "3")
        done = subprocess.run(
            [sys.executable, *words],
            env=environment(GLOG_v="3", OMP_NUM_THREADS="1"),
            cwd=ROOT,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=LIMIT_S,
        )
        path = tmp_path / f"report-{rank}.json"
        assert path.exists(), f"rank {rank} left no report: {(done.stdout + done.stderr)[-4000:]}"
        return json.loads(path.read_text())

    with ThreadPoolExecutor(3) as threads:
        reports = list(threads.map(be, range(3)))
    failed = [
        f"{name}, rank {rank}: {report[name]}"
        for name in checks()
        for rank, report in enumerate(reports)
        if report[name]
    ]
    assert not failed, "\n".join(failed)
    scheduler = reports[0]["scheduler"]
    assert scheduler is not None
    assert not alive(scheduler)
    assert max(report["close_s"] for report in reports) < 5.0  # as long as it would linger


# ------------------------------------------------------------------ Rendezvous


def on_ranks(folder, ranks, size, stops=(), **more):
    """Meet on these ranks, of which those in `stops` are asked to stop; return their futures."""

    def be(rank):
        one = spec(folder, rank, size, stop_requested=lambda: rank in stops, **more)
        return await_verdict(one) if rank else decide(one, lambda: {"port": 7})

    with ThreadPoolExecutor() as threads:
        return [threads.submit(be, rank) for rank in ranks]


@pytest.mark.parametrize(
    ("ranks", "size", "how", "wanted"),
    [
        ([0, 1, 2], 3, {}, {"verdict": "go", "port": 7}),
        ([0, 2], 5, {"timeout_s": 3}, "ranks 1, 3-4 5 3 s"),
        ([1, 2], 3, {"timeout_s": 0.3}, "rank 0 3 0.3 s"),
        ([0, 1], 3, {"stops": [1]}, StopRequested),
        ([1], 2, {"stops": [1]}, StopRequested),
    ],
    ids=["all meet", "ranks are missing", "rank 0 is missing", "a stop", "a stop before rank 0"],
)
def test_all_ranks_that_came_get_the_same_verdict(tmp_path, ranks, size, how, wanted):
    for found in on_ranks(tmp_path, ranks, size, **how):
        if isinstance(wanted, dict):
            assert found.result() == wanted
        elif wanted is StopRequested:
            assert isinstance(found.exception(), StopRequested)
        else:
            assert type(found.exception()) is RanksMissing
            assert mentions(str(found.exception()), wanted), str(found.exception())


def test_no_rank_leaves_before_the_last_one(tmp_path):
    on_ranks(tmp_path, range(3), 3)
    with ThreadPoolExecutor() as threads:
        others = [threads.submit(leave_together, spec(tmp_path, rank, 3)) for rank in (0, 1)]
        assert not wait(others, 0.3).done
        leave_together(spec(tmp_path, 2, 3))
    assert all(other.exception() is None for other in others)


def test_a_rank_that_does_not_leave_ends_the_wait_of_the_others(tmp_path):
    on_ranks(tmp_path, range(2), 2)
    with refused(PeerLost, "rank 0 group 0.3 s"):
        leave_together(spec(tmp_path, 0, 2, collective_timeout_s=0.3))


def test_a_host_name_is_refused_where_an_address_is_needed(tmp_path):
    with refused(TransportError, "'localhost' cluster.interface=eth0"):
        form_group(spec(tmp_path, 1, 2, address="localhost"))


@pytest.mark.parametrize(
    ("transport", "names"),
    [
        ("hccl", "CANN transport=mccl"),
        ("nccl", "GPU transport=mccl"),
        ("gloo", "hccl nccl mccl transport=auto"),
    ],
)
def test_a_missing_transport_is_refused(tmp_path, transport, names):
    with refused(TransportError, f"transport={transport} {names}"):
        form_group(spec(tmp_path, 0, 1, transport=transport))


def test_hccl_gets_our_time_outs_within_its_limits_unless_they_were_set_by_hand(tmp_path):
    one = spec(tmp_path, 3, 16, timeout_s=60.0, collective_timeout_s=1800.0)
    found = variables(one, "hccl", ("10.0.0.1", 4321), {})
    wanted = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "3", "MS_WORKER_NUM": "16"}
    wanted |= {"MS_SCHED_HOST": "10.0.0.1", "MS_SCHED_PORT": "4321"}
    wanted |= {"HCCL_CONNECT_TIMEOUT": "120", "HCCL_EXEC_TIMEOUT": "1800"}
    assert found.items() >= wanted.items()
    by_hand = variables(one, "hccl", ("10.0.0.1", 1), {"HCCL_CONNECT_TIMEOUT": "900"})
    assert by_hand["HCCL_CONNECT_TIMEOUT"] == "900"
    assert "MS_CPU_COMM_OP_TIMEOUT" in variables(one, "mccl", ("10.0.0.1", 1), {})


def test_a_rank_takes_the_device_of_its_local_rank_among_those_it_sees():
    seen = {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6"}
    indices, names = zip(*(device_of_rank("hccl", rank, seen) for rank in range(3)), strict=True)
    assert (indices, names) == ((0, 1, 2), ("Ascend 4", "Ascend 5", "Ascend 6"))
    with refused(TransportError, "rank 3 ASCEND_RT_VISIBLE_DEVICES=4,5,6 cluster.ranks_per_node=3"):
        device_of_rank("hccl", 3, seen)


@pytest.mark.parametrize(
    ("nodes", "shown", "shared"),
    [
        ("nn", ("6", "6"), "ranks 0 1 n Ascend 6 cluster.ranks_per_node transport=mccl"),
        ("nn", ("6", "7"), ""),  # a scheduler shows each rank its own
        ("nm", ("6", "6"), ""),
    ],
)
def test_ranks_that_share_the_one_device_they_see_are_refused_on_all_of_them(
    tmp_path, nodes, shown, shared
):
    def meet(rank):
        seen = {"ASCEND_RT_VISIBLE_DEVICES": shown[rank]}
        _, device = device_of_rank("hccl", rank, seen)
        one = replace(spec(tmp_path, rank, 2), node=nodes[rank])
        try:
            found = await_verdict(one, device) if rank else decide(one, lambda: {"port": 7}, device)
        except TransportError as error:
            return str(error)
        return found["verdict"].removeprefix("go")

    with ThreadPoolExecutor(2) as threads:
        refusals = list(threads.map(meet, range(2)))
    assert [bool(refusal) for refusal in refusals] == [bool(shared)] * 2
    assert all(mentions(refusal, shared) for refusal in refusals), refusals


def test_a_single_rank_needs_no_others(tmp_path):
    group = form_group(spec(tmp_path, 0, 1))
    group.barrier()
    assert (group.size, group.counters.collectives) == (1, 0)
    group.close()


def test_a_foreign_address_is_refused():
    with refused(RendezvousError, "rank 0 192.0.2.1 cluster.interface"):
        Scheduler("192.0.2.1", 2, 30.0)


def test_a_scheduler_dies_with_its_parent():
    program = (
        "import os, sys; from orchestrator.engine.mindspore.rendezvous import Scheduler; "
        "s = Scheduler('127.0.0.1', 2, 30.0); print(s.process.pid, flush=True); "
        "sys.stdin.readline(); os.kill(os.getpid(), 9)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        parent.wait(60)
    until(lambda: not alive(child), what="the scheduler's end")


def test_a_scheduler_that_ended_before_it_listened_is_no_wait():
    scheduler = Scheduler("127.0.0.1", 2, 30.0)
    try:
        scheduler.process.kill()
        scheduler.process.wait()
        with refused(RendezvousError, f"127.0.0.1:{scheduler.port} -9"):
            scheduler.ready()
    finally:
        scheduler.end()
