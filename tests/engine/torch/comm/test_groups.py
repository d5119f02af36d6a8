"""Every group of the torch engine keeps the contract of groups."""

import subprocess
import sys

import pytest
import torch

from orchestrator.engine.conformance import CHECKS
from orchestrator.engine.torch import TorchGroup, run_in_threads
from orchestrator.engine.torch.comm.running_collectives import as_peer_lost
from orchestrator.engine.torch.comm.tensors import add_up
from orchestrator.errors import PeerLost
from orchestrator.testing.torch_groups import TORCH_CHECKS, TorchArrays
from orchestrator.testing.transports import all_checks
from tests.engine.torch.processes import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_threads_pass_the_suite(check, size):
    run_in_threads(size, lambda group: check(group, TorchArrays()))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("check", TORCH_CHECKS, ids=lambda check: check.__name__)
def test_threads_pass_what_torch_asks_beside_it(check, size):
    run_in_threads(size, check)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_processes_over_gloo_pass_the_suite(tmp_path, size):
    assert run_ranks(size, tmp_path, all_checks) == ["gloo"] * size


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_lone_rank_passes_the_suite(check):
    check(TorchGroup.alone(), TorchArrays())


HALVES = (torch.bfloat16, torch.float16)


def _summed_segments(group):
    """Five at once, more than gloo's have room for; small ones, and such as go from rank to rank.

    Gives the counts of our collectives and of the transport's own.
    """
    ranks, mark = group.size, group.mark()
    before = group.transport_collectives()
    for dtype in (torch.float32, torch.float64, *HALVES):
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
    return counted


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_segments_are_summed_where_they_belong_and_gathered_again(tmp_path, ranks):
    calls = 0 if ranks == 1 else 40
    assert run_ranks(ranks, tmp_path, _summed_segments) == [(calls, calls)] * ranks
    assert run_in_threads(ranks, _summed_segments) == [(calls, calls)] * ranks


def _bytes_of_a_segmented_sum(group):
    tensor = torch.ones(6 * group.size)
    mark = group.mark()
    group.reduce_scatter_sum_async(tensor[:6], tensor).wait()
    group.gather_in_place_async(tensor).wait()
    return group.since(mark).bytes_on_wire


def test_a_segmented_sum_and_a_gather_send_what_an_all_reduce_does():
    assert run_in_threads(3, _bytes_of_a_segmented_sum) == [2 * 2 * 6 * 4] * 3


def test_halves_are_added_up_in_float32():
    parts = [torch.full((3,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    out = torch.empty(3, dtype=torch.bfloat16)
    add_up(out, parts)
    assert out.tolist() == [258.0] * 3  # one by one, each 1 would be lost
    add_up(parts[0], parts[:1])
    assert parts[0].tolist() == [256.0] * 3


def _large_parts(group):
    found = []
    for turn in range(2):
        parts = [torch.empty(100_000) for _ in range(group.size)]
        mine = torch.arange(100_000.0) + 1000 * turn + group.rank
        before, counted = group.counters.collectives, group.transport_collectives()
        group.gather_into(parts, mine)
        assert group.counters.collectives == before + 1
        assert group.transport_collectives() == counted + 1  # of many sends it is made
        found += [torch.equal(part - rank, mine - group.rank) for rank, part in enumerate(parts)]
        rows = group.all_gather(mine[: 90_000 + group.rank], [90_000, 90_001, 90_002])
        found.append(len(rows) == 270_003 and bool(rows[90_000] == 1000 * turn + 1))
    return found


def test_large_parts_are_gathered_into_place(tmp_path):
    assert run_ranks(3, tmp_path, _large_parts) == [[True] * 8] * 3


def _gather_without_the_last(group):
    if group.rank == group.size - 1:
        return "left"
    parts = [torch.empty(100_000) for _ in range(group.size)]
    with pytest.raises(PeerLost, match="lost a peer during all_gather"):
        group.gather_into(parts, torch.ones(100_000))
    return "told"


def _sum_without_the_last(group):
    if group.rank == group.size - 1:
        return "left"
    tensor = torch.ones(100_000 * group.size)
    with pytest.raises(PeerLost, match="lost a peer during reduce_scatter_sum"):
        group.reduce_scatter_sum_async(tensor[:100_000], tensor).wait()
    return "told"


def test_a_peer_that_is_gone_is_told_in_a_segmented_sum(tmp_path):
    assert run_ranks(3, tmp_path, _sum_without_the_last) == ["told", "told", "left"]


def test_a_peer_that_is_gone_is_told_in_a_large_gather(tmp_path):
    assert run_ranks(3, tmp_path, _gather_without_the_last) == ["told", "told", "left"]


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


def test_a_rank_that_leaves_early_is_lost_to_the_other_threads():
    def work(group):
        if group.rank == 0:
            group.barrier()

    with pytest.raises(PeerLost, match="rank 1 ended without calling it"):
        run_in_threads(2, work)


def test_ranks_that_call_different_collectives_are_told_so():
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
    assert (as_peer_lost(RuntimeError(text), "all_reduce_sum", 0) is not None) == lost


SCRIPT = """
import torch
import torch.distributed as dist
from orchestrator.engine.torch import Accumulator, Loss, TorchGroup, all_reduce_mean

dist.init_process_group("gloo")
group = TorchGroup.wrap(dist.group.WORLD)
x = torch.tensor([float(group.rank)], requires_grad=True)
y = all_reduce_mean(x, group)
y.sum().backward()
assert (y.item(), x.grad.item()) == (0.5, 1.0), (y, x.grad)
assert group.counters.collectives == 2

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
data = torch.randn(7, 3)
accumulator = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.0), group)
mine = [data[:2], data[2:3], data[3:6]] if group.rank == 0 else [data[6:]]
for number, batch in enumerate(mine):
    total = model(batch).square().sum()
    accumulator.backward(Loss(total, weight=len(batch)), last=number == len(mine) - 1)
report = accumulator.boundary()
big_batch = torch.autograd.grad(model(data).square().mean(), list(model.parameters()))
for parameter, wanted in zip(model.parameters(), big_batch):
    torch.testing.assert_close(parameter.grad, wanted, rtol=1e-6, atol=1e-7)
assert report.collectives == 1
dist.destroy_process_group()
"""


def test_a_torchrun_script_of_somebody_else_gets_the_big_batchs_gradient(tmp_path):
    script = tmp_path / "theirs.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            script,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr


def _environment():
    import os
    from pathlib import Path

    root = Path(__file__).resolve().parents[4]
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
