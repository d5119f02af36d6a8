"""Groups of torch: transports, gradients of collectives, silence, tensors that gloo holds."""

import contextlib
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from orchestrator import Loss
from orchestrator.engine.torch import TorchGroup, all_gather, all_reduce_mean, all_reduce_sum
from orchestrator.engine.torch.conformance import all_checks
from orchestrator.engine.torch.group import flatten, sum_into
from orchestrator.engine.torch.transports import peer_lost_during
from orchestrator.errors import PeerLost, SilenceError
from orchestrator.local_ranks.processes import run_ranks
from orchestrator.local_ranks.threads import run_in_threads
from slurm.polling import first_true
from tests.engine.torch.jobs import sgd_accumulator
from tests.helpers import LIMIT_S, ROOT


def test_a_view_that_torch_negates_lazily_travels_with_its_sign():
    assert flatten(torch.tensor([1 + 2j]).conj().imag).tolist() == [-2.0]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_threads_pass_the_suite_of_all_transports(size):
    run_in_threads(size, all_checks)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_processes_over_gloo_pass_the_suite_and_sum_segments_where_they_belong(tmp_path, size):
    calls = 0 if size == 1 else 40
    wanted = [("gloo", (calls, calls))] * size
    assert run_ranks(size, tmp_path, _pass_suite_and_sum_segments) == wanted


def _pass_suite_and_sum_segments(group):
    """Sum five segments at once, more than gloo's have room for; small and large ones.

    Return what the suite returns, and the counts of our collectives and of the transport's own.
    """
    checked, ranks, mark = all_checks(group), group.size, group.mark()
    before = group.transport_collectives()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for length in (2, 100_000):
            row = torch.arange(ranks * length).remainder(7)
            given = [((group.rank + 1) * row + turn).to(dtype) for turn in range(5)]
            works = [
                group.reduce_scatter_sum_async(one.chunk(ranks)[group.rank], one) for one in given
            ]
            for work in reversed(works):
                work.wait()
            wanted = [row * sum(range(ranks + 1)) + turn * ranks for turn in range(5)]
            for one, whole in zip(given, wanted, strict=True):
                mine = whole.to(dtype).chunk(ranks)[group.rank]
                assert torch.equal(one.chunk(ranks)[group.rank], mine), dtype
    counted = group.since(mark).collectives, group.transport_collectives() - before
    for length in (2, 100_000):
        given = [torch.full((ranks * length,), turn + 10.0 * group.rank) for turn in range(5)]
        for work in [group.gather_in_place_async(one) for one in given]:
            work.wait()
        for turn, one in enumerate(given):
            owners = torch.arange(ranks).repeat_interleave(length)
            assert torch.equal(one, turn + 10.0 * owners)
    sizes = [90_000 + rank for rank in range(ranks)]
    owners = torch.arange(ranks).repeat_interleave(torch.tensor(sizes))
    assert torch.equal(
        group.all_gather(torch.full((sizes[group.rank],), group.rank), sizes), owners
    )
    return checked, counted


def test_halves_are_added_up_in_float32():
    parts = [torch.full((3,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    out = torch.empty(3, dtype=torch.bfloat16)
    sum_into(out, parts)
    assert out.tolist() == [258.0] * 3  # one by one, each 1 would be lost
    sum_into(parts[0], parts[:1])
    assert parts[0].tolist() == [256.0] * 3


def _without_the_last(group):
    group.barrier()  # a rank that leaves earlier breaks the others' connecting
    if group.rank == group.size - 1:
        return "left"
    tensor = torch.ones(100_000 * group.size)
    with pytest.raises(PeerLost, match="lost a peer during all_gather"):
        group.gather_in_place_async(tensor).wait()
    with pytest.raises(PeerLost, match="lost a peer during reduce_scatter_sum"):
        group.reduce_scatter_sum_async(tensor[:100_000], tensor).wait()
    with pytest.raises(PeerLost, match="lost a peer during all_reduce_sum"):
        group.all_reduce_sum(tensor)
    return "lost"


def test_collectives_report_a_lost_peer(tmp_path):
    assert run_ranks(3, tmp_path, _without_the_last) == ["lost", "lost", "left"]


def test_a_rank_that_raises_is_lost_to_the_other_threads():
    seen = []

    def work(group):
        if group.rank == 1:
            raise ValueError("broken")
        try:
            group.barrier()
        except PeerLost as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="broken"):
        run_in_threads(3, work)
    assert len(seen) == 2
    assert "rank 1 ended with ValueError" in seen[0]


def test_different_collectives_on_two_ranks_are_reported():
    def work(group):
        if group.rank == 0:
            group.barrier()
        else:
            group.all_reduce_sum(torch.ones(1))

    with pytest.raises(AssertionError, match="rank 1 called all_reduce_sum"):
        run_in_threads(2, work)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer", True),
        ("[pair.cc:553] Connection closed by peer [127.0.0.1]:2", True),
        ("Timed out waiting 1800000ms for recv operation to complete", True),
        ("Application timeout caused pair closure", True),
        ("ProcessGroupGloo::allgather: invalid tensor size at index 0", False),
        ("Invalid scalar type", False),
    ],
)
def test_only_errors_about_peers_become_peer_lost(text, lost):
    with (
        pytest.raises(PeerLost if lost else RuntimeError) as raised,
        peer_lost_during("all_reduce_sum", 0),
    ):
        raise RuntimeError(text)
    assert isinstance(raised.value, PeerLost) == lost


# ------------------------------------------------------------------ Gradients of collectives


def _inner(a, b):
    return torch.vdot(a.reshape(-1), b.reshape(-1)).real.item()


def _apply(name, x, group, sizes):
    if name == "gather":
        return all_gather(x, group, sizes)
    return {"sum": all_reduce_sum, "mean": all_reduce_mean}[name](x, group)


def _blocks(seed, sizes, dtype):
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(3, n, dtype=dtype, generator=made).t() for n in sizes]  # not contiguous


@given(
    data=st.data(),
    name=st.sampled_from(["sum", "mean", "gather"]),
    size=st.integers(1, 5),
    seed=st.integers(0, 2**30),
    dtype=st.sampled_from([torch.float64, torch.complex128]),
)
@settings(max_examples=60)
def test_backward_is_the_adjoint_twice_and_modifies_nothing(data, name, size, seed, dtype):
    even = [data.draw(st.integers(0, 4))] * size
    uneven = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    sizes = uneven if name == "gather" else even

    def sides(group):
        """Return this rank's parts of sum <A x, u> and sum <x, A* u>."""
        x = _blocks(seed, sizes, dtype)[group.rank].requires_grad_()
        y = _apply(name, x, group, sizes)
        made = torch.Generator().manual_seed(seed + 1 + group.rank)
        u = torch.randn(*reversed(y.shape), dtype=dtype, generator=made).t()
        kept_x, kept_u = x.detach().clone(), u.clone()
        [back] = torch.autograd.grad(y, x, u.requires_grad_(), create_graph=True)
        [forth] = torch.autograd.grad(back, u, x.detach())  # as for a second derivative
        torch.testing.assert_close(forth, y.detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(x.detach(), kept_x)
        assert torch.equal(u.detach(), kept_u)
        return _inner(y.detach(), u.detach()), _inner(x.detach(), back.detach())

    forward, backward = map(sum, zip(*run_in_threads(size, sides), strict=True))
    assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12)


def test_tensors_that_cannot_be_gathered_are_refused():
    with pytest.raises(ValueError, match=r"needs an axis 0"):
        run_in_threads(2, lambda group: all_gather(torch.ones(()), group))
    with pytest.raises(ValueError, match=r"with 2 for rank 1, but is \[2, 3\]"):
        run_in_threads(2, lambda group: all_gather(torch.ones(2), group, sizes=[2, 3]))


# ------------------------------------------------------------------ Silence


TCP_INFO_BYTES = 216
BYTES_SENT, BYTES_SENT_AGAIN = 200, 208  # where struct tcp_info of linux/tcp.h has them


def _bytes_sent():
    """Bytes that each TCP socket of this process has sent, by its addresses: the kernel's count.

    What it sends once more, because a busy machine was late, does not count again.
    """
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        if not descriptor.is_socket():
            continue
        with socket.socket(fileno=os.dup(int(descriptor.name))) as known:
            if known.type != socket.SOCK_STREAM or known.family == socket.AF_UNIX:
                continue
            info = known.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            with contextlib.suppress(OSError):  # one that listens has no other end
                sent, again = (
                    struct.unpack_from("Q", info, at)[0] for at in (BYTES_SENT, BYTES_SENT_AGAIN)
                )
                found[known.getsockname(), known.getpeername()] = sent - again
    return found


def _since(before):
    """Bytes sent since `before`; a socket that is gone, as the store's may be, sent none."""
    return sum(sent - before.get(pair, 0) for pair, sent in _bytes_sent().items())


def _windows_of(group, every_k):
    """(collectives in mid-window, in all, bytes in mid-window, in all, reported) for each K."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 400))
    ours = sgd_accumulator(model, group, bucket_bytes=2**18)
    found = []
    for steps in every_k:
        group.barrier()
        calls, before = group.transport_collectives(), _bytes_sent()
        for step in range(steps):
            if step == steps - 1:
                middle = (group.transport_collectives() - calls, _since(before))
            total = model(torch.ones(2, 400)).square().sum()
            ours.backward(Loss(total, 2), last=step == steps - 1)
        report = ours.boundary()
        assert group.transport_collectives() - calls == report.collectives
        group.barrier()  # until then the last bytes may wait in this process
        whole = (report.collectives, _since(before))
        found.append((*middle, *whole, report.bytes_on_wire))
    return found, ours.parameter_count(), ours.buffers.trailer.numel()


def test_one_reductions_worth_is_sent_whatever_the_number_of_micro_steps(tmp_path):
    ranks = 3
    for found, parameters, trailer in run_ranks(ranks, tmp_path, _windows_of, (1, 2, 5, 16)):
        payload = 4 * (parameters + trailer)
        buckets = -(-payload // 2**18)
        floor = 2 * (ranks - 1) / ranks * payload
        for calls_within, bytes_within, calls, sent, reported in found:
            assert calls_within == 0
            assert bytes_within < 1000  # the barrier's last words
            assert calls == buckets
            assert reported == pytest.approx(floor, rel=1e-6)
            assert sent == pytest.approx(floor, rel=0.05)


def _behind_our_back(group):
    model = nn.Linear(2, 1)
    theirs = TorchGroup.wrap(group._group)  # as a job does that uses the process group itself
    ours = sgd_accumulator(model, theirs)
    ours.backward(Loss(model(torch.ones(1, 2)).sum(), 1))
    group._group.allreduce([torch.ones(1)]).wait()
    ours.boundary()


def test_collectives_on_the_process_group_itself_are_noticed(tmp_path):
    with pytest.raises(
        AssertionError, match="1 collectives ran on this process group in mid-window"
    ):
        run_ranks(2, tmp_path, _behind_our_back)


def _interrupted_in_window(group):
    """A loss is noticed after the last micro-step, before the boundary checks the window."""
    model = nn.Linear(2, 1)
    ours = sgd_accumulator(model, group)
    ours.backward(Loss(model(torch.ones(1, 2)).sum(), 1))
    group.interrupt()
    with pytest.raises(PeerLost):
        ours.boundary()
    return True


def test_interrupting_a_group_counts_as_no_collective_of_the_job(tmp_path):
    assert run_ranks(2, tmp_path, _interrupted_in_window) == [True, True]


def test_every_collective_of_a_group_keeps_silence():
    def be(group):
        group.silence = "now"
        calls = [
            lambda: group.all_reduce_sum(torch.ones(1)),
            lambda: group.all_gather(torch.ones(1)),
            lambda: group.broadcast(torch.ones(1)),
            lambda: group.all_to_all(torch.ones(2), torch.ones(2), counts=[1, 1]),
            lambda: group.gather_in_place_async(torch.ones(2)),
            lambda: group.reduce_scatter_sum_async(torch.ones(1), torch.ones(2)),
            group.barrier,
        ]
        for call in calls:
            with pytest.raises(SilenceError):
                call()

    run_in_threads(2, be)


# ------------------------------------------------------------------ Tensors that gloo holds


# All threads but the main one run only when nothing else would, so that gloo's thread is overtaken:
# between saying that the collective is done and freeing its tensors, or where it has freed them and
# waits for Python's lock, which one thread keeps for a while.
START = """
import os, sys, time, torch
import torch.distributed as dist
from orchestrator.engine.torch import TorchGroup

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = TorchGroup.wrap(dist.group.WORLD)
group.all_reduce_sum(torch.ones(1000))
processor, idle = {min(os.sched_getaffinity(0))}, os.sched_param(0)
threads = [int(thread) for thread in os.listdir("/proc/self/task")]

def overtake():
    for thread in threads:
        os.sched_setaffinity(thread, processor)
        if thread != threads[0]:
            os.sched_setscheduler(thread, os.SCHED_IDLE, idle)
"""
BEFORE_IT_FREES = """
overtake()
group.all_reduce_sum(torch.ones(1000))
group.all_gather(torch.ones(1000))
group.broadcast(torch.ones(1000))
"""
BEFORE_IT_HAS_THE_LOCK = """
group.all_gather(torch.ones(1000))
sys.setswitchinterval(60.0)
group.all_reduce_sum(torch.ones(1000))
group.broadcast(torch.ones(1000))
end = time.monotonic() + 0.1
while time.monotonic() < end:
    pass
overtake()
"""
END = "print(group.counters.collectives)"


def test_processes_that_end_right_after_a_collective_do_not_abort(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with contextlib.ExitStack() as stack:  # without `_wait_for_gloo` one rank in three aborts
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-c",
                        START + overtaken + END,
                        str(rank),
                        str(tmp_path / f"store{turn}"),
                    ],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for turn, overtaken in enumerate((BEFORE_IT_FREES, BEFORE_IT_HAS_THE_LOCK))
            for rank in range(2)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        first_true(lambda: all(rank.poll() is not None for rank in ranks), seconds=10)
        for rank in ranks:  # an idle priority would get no time for minutes beside busy processes
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                for thread in os.listdir(f"/proc/{rank.pid}/task"):  # noqa: PTH208
                    os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))
        ended = [(*rank.communicate(timeout=LIMIT_S), rank.returncode) for rank in ranks]
    assert ended == [("4\n", "", 0)] * 4
