"""Ranks are silent between boundaries: by the transport's own count, and by the kernel's bytes."""

import contextlib
import os
import socket
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

from orchestrator.engine.common.no_collectives import Silence
from orchestrator.engine.torch import Accumulator, Loss, TorchGroup, run_in_threads
from orchestrator.errors import SilenceError
from tests.engine.torch.processes import run_ranks

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
            told = known.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            with contextlib.suppress(OSError):  # one that listens has no other end
                sent, again = (
                    struct.unpack_from("Q", told, at)[0] for at in (BYTES_SENT, BYTES_SENT_AGAIN)
                )
                found[known.getsockname(), known.getpeername()] = sent - again
    return found


def _since(before):
    """Bytes sent since `before`; a socket that is gone, as the store's may be, sent none."""
    return sum(sent - before.get(pair, 0) for pair, sent in _bytes_sent().items())


def _windows_of(group, every_k, wire):
    """(collectives in mid-window, in all, bytes in mid-window, in all, reported) for each K."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 400))
    ours = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), group, bucket_bytes=2**18, wire=wire
    )
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


@pytest.mark.parametrize(("ranks", "wire"), [(2, "own"), (3, "own"), (2, "bfloat16")])
def test_one_reductions_worth_is_sent_whatever_the_number_of_micro_steps(tmp_path, ranks, wire):
    for found, parameters, trailer in run_ranks(ranks, tmp_path, _windows_of, (1, 2, 5, 16), wire):
        gradient = parameters * (4 if wire == "own" else 2)
        payload = gradient + 4 * trailer
        buckets = -(-payload // 2**18) if wire == "own" else -(-gradient // 2**18) + 1
        floor = 2 * (ranks - 1) / ranks * payload
        for calls_within, bytes_within, calls, sent, reported in found:
            assert calls_within == 0
            assert bytes_within < 1000  # the barrier's last words
            assert calls == buckets
            assert reported == pytest.approx(floor, rel=1e-6)
            assert sent == pytest.approx(floor, rel=0.05)


def test_only_the_engines_own_collectives_are_exempt():
    silence = Silence()
    silence.check("barrier")
    silence.keep("in mid-window of update 3")
    with pytest.raises(SilenceError, match=r"'barrier' was called in mid-window of update 3; "):
        silence.check("barrier")
    with silence.lifted():
        silence.check("all_reduce_sum")
    assert silence.kept
    silence.end()
    silence.check("barrier")


def _behind_our_back(group):
    model = nn.Linear(2, 1)
    theirs = TorchGroup.wrap(group._group)  # as a job does that uses the process group itself
    ours = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), theirs)
    ours.backward(Loss(model(torch.ones(1, 2)).sum(), 1))
    group._group.allreduce([torch.ones(1)]).wait()
    ours.boundary()


def test_collectives_on_the_process_group_itself_are_noticed(tmp_path):
    with pytest.raises(
        AssertionError, match="1 collectives ran on this process group in mid-window"
    ):
        run_ranks(2, tmp_path, _behind_our_back)


def test_every_collective_of_a_group_keeps_silence():
    def be(group):
        group.silence.keep("now")
        calls = [
            lambda: group.all_reduce_sum(torch.ones(1)),
            lambda: group.all_gather(torch.ones(1)),
            lambda: group.broadcast(torch.ones(1)),
            lambda: group.all_to_all(torch.ones(2), torch.ones(2), counts=[1, 1]),
            lambda: group.gather_into([torch.ones(1)] * 2, torch.ones(1)),
            group.barrier,
        ]
        for call in calls:
            with pytest.raises(SilenceError):
                call()

    run_in_threads(2, be)
