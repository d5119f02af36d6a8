"""Behaviour of GPUs that can be tested without one: late results and ranks, waits, devices."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchestrator import Loss
from orchestrator.engine.common.replicas import WeightRange
from orchestrator.engine.torch import (
    Accumulator,
    TorchGroup,
    consistency_checks,
    form_group,
    group,
    model,
    rendezvous,
    transports,
)
from orchestrator.errors import ConfigError, JobError, PeerLost, ReplicasDiffer, TransportError
from orchestrator.local_ranks import threads
from orchestrator.local_ranks.processes import run_ranks, spec
from orchestrator.local_ranks.threads import run_in_threads
from tests.engine.torch.jobs import numbers_of, sgd_accumulator


class LateGroup(threads.InProcessGroup):
    """Overwrites a collective's tensors until it is waited for, as a busy device might."""

    def _late(self, work, *tensors):
        for tensor in tensors:
            tensor.fill_(float("nan"))

        def check():
            assert all(bool(tensor.isnan().all()) for tensor in tensors), "written while under way"

        return group.ChainedWork(group.ChainedWork(after=check), work.wait)

    def _start_sum(self, flat):
        return self._late(super()._start_sum(flat), flat)

    def _start_reduce_scatter(self, out, tensor):
        return self._late(super()._start_reduce_scatter(out, tensor), tensor)

    def _start_gather(self, parts, flat):
        others = [part for rank, part in enumerate(parts) if rank != self.rank]
        return self._late(super()._start_gather(parts, flat), *others)

    def _start_exchange(self, received, sent, receive_counts, send_counts):
        work = super()._start_exchange(received, sent, receive_counts, send_counts)
        return self._late(work, received)


def _trained(ranks, **options):
    def train(ours):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        accumulator = Accumulator(model, optimizer, ours, clip_norm=0.5, **options)
        data = torch.randn(3, ranks, 2, 5, 8)
        for update in range(3):
            for step in range(2):
                batch = data[update, ours.rank, step]
                loss = Loss(model(batch).square().sum(), len(batch))
                accumulator.backward(loss, last=step == 1)
            accumulator.boundary()
        return numbers_of(model)

    return run_in_threads(ranks, train)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"bucket_bytes": 256},
        {"shard_optimizer": True},
        {"reduction": "reproducible"},
    ],
    ids=str,
)
def test_nothing_is_read_before_its_wait_nor_written_while_under_way(options, monkeypatch):
    wanted = _trained(2, **options)
    monkeypatch.setattr(threads, "InProcessGroup", LateGroup)
    for found, right in zip(_trained(2, **options), wanted, strict=True):
        assert torch.equal(found, right)


class Lazy(transports.Gloo):
    """Connects at its first collective, with the help of the store, as NCCL does."""

    @classmethod
    def form(cls, spec, store):
        made = super().form(spec, store)
        start, met = made._start, []

        def started(*arguments):
            if not met:
                met.append(True)
                if spec.rank == 0:
                    store.set("unique-id", "…")
                store.get("unique-id")
            return start(*arguments)

        made._start = started
        return made


def _first_collective_late(ours, folder):
    rendezvous._STORE_TIMEOUT_S = 0.5
    rendezvous.transport_of = lambda _: Lazy
    following = form_group(spec(ours.rank, 2, folder, generation=1))
    if ours.rank == 0:
        time.sleep(2.0)  # four times as long as the store waits during the rendezvous
    number = torch.ones(1)
    following.all_reduce_sum(number)
    return number.item()


def test_a_rank_may_be_late_at_the_first_collective_of_a_transport_that_connects_there(tmp_path):
    assert run_ranks(2, tmp_path, _first_collective_late, tmp_path) == [2.0, 2.0]


# ------------------------------------------------------------------ Waits that block a stream


class Stream:
    """Work whose `wait()` without a time-out returns at once, as that of NCCL."""

    def __init__(self, ready):
        self.ready = ready

    def wait(self, timeout=None):
        if timeout is not None and not self.ready.wait(timeout.total_seconds()):
            raise RuntimeError(
                "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, "
                "OpType=ALLREDUCE, Timeout(ms)=100) ran for 101 milliseconds before timing out."
            )


class NcclOf:
    """The face of a process group over NCCL, with its watchdog's time-out."""

    def __init__(self, timeout_s):
        self.options = SimpleNamespace(_timeout=timedelta(seconds=timeout_s))
        self.ready = threading.Event()
        self.allreduce = lambda tensors: Stream(self.ready)

    def abort(self):
        """End the kernels under way, whose tensors hold anything then."""
        self.ready.set()

    def name(self):
        return "nccl"

    def rank(self):
        return 0

    def size(self):
        return 2

    def _get_backend(self, device):
        return self


def test_a_wrapped_group_waits_no_longer_than_its_watchdog():
    ours = TorchGroup.wrap(nccl := NcclOf(0.2), device="cpu")
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"lost a peer during all_reduce_sum: .*timing out"):
        ours.all_reduce_sum(torch.ones(1))
    assert time.monotonic() - began >= 0.18
    assert nccl.ready.is_set(), "it is aborted, so that its watchdog does not end the process"
    with pytest.raises(PeerLost, match="broken off"):
        ours.all_reduce_sum(torch.ones(1))


def test_an_interrupted_wait_of_nccl_is_a_lost_peer_whatever_the_abort_leaves():
    ours = TorchGroup.wrap(NcclOf(60), device="cpu")
    under_way = ours.all_reduce_sum_async(torch.ones(1))
    threading.Timer(0.1, ours.interrupt).start()
    with pytest.raises(PeerLost, match="during all_reduce_sum: it was broken off"):
        under_way.wait()
    with pytest.raises(PeerLost, match="broken off"):
        ours.all_reduce_sum(torch.ones(1))


def test_no_rank_over_nccl_leaves_before_the_devices_of_all_are_done(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: done.append(True))
    stores = [rendezvous.host(spec(0, 2, tmp_path))]
    stores.append(rendezvous.join(spec(1, 2, tmp_path), time.monotonic() + 60))
    groups = [TorchGroup.wrap(NcclOf(60), device="cpu") for _ in stores]
    for ours, store in zip(groups, stores, strict=True):
        ours.store = store
    first = threading.Thread(target=groups[0].close, daemon=True)
    first.start()
    first.join(0.2)
    assert first.is_alive()
    groups[1].close()
    first.join(30)
    assert not first.is_alive()
    assert len(done) == 2


class Reads(TorchFunctionMode):
    """Counts what waits for a device: reads of tensors' numbers by Python."""

    WAIT = ("tolist", "item", "__bool__", "__float__", "__int__", "cpu", "numpy", "equal")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in self.WAIT:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_a_boundary_reads_from_its_device_four_times_and_a_micro_step_never(monkeypatch):
    """That is for the losses, the digest of the weights, the summed trailer, and the norm."""
    # Every tensor passes for one of a device; what these take is on the CPU in truth.
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda _: False), raising=False)

    def train(ours):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        accumulator = Accumulator(model, optimizer, ours, clip_norm=0.5, bucket_bytes=256)
        found = []
        for _ in range(2):
            with Reads() as steps:
                for step in range(3):
                    loss = Loss(model(torch.ones(5, 8)).square().sum(), 5)
                    accumulator.backward(loss, last=step == 2)
            with Reads() as boundary:
                accumulator.boundary()
            found.append((steps.found, boundary.found))
        return found

    for windows in run_in_threads(2, train):
        assert windows == [([], ["tolist"] * 4)] * 2


# ------------------------------------------------------------------ Devices


@pytest.fixture
def fake_world():
    dist.init_process_group("fake", rank=0, world_size=256, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_device_of_a_backend_that_is_no_ones_known_is_the_given_or_the_cpu(fake_world):
    ours = TorchGroup.wrap(fake_world)
    assert (ours.device.type, ours.size, ours.transport_collectives()) == ("cpu", 256, None)
    assert TorchGroup.wrap(fake_world, device="meta").device.type == "meta"
    assert transports.group_of_torch("cuda").device.type == "cuda"
    model = nn.Linear(1, 1, device="meta")
    for given in (model, list(model.parameters())):
        with pytest.raises(ConfigError, match=r"the model is on meta, but the backend.*move the"):
            Accumulator(given, torch.optim.SGD(model.parameters(), lr=1.0))


def test_torch_built_for_gpus_works_on_a_machine_without(fake_world, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert TorchGroup.wrap(fake_world).device.type == "cpu"


def test_a_transport_that_does_not_add_up_is_not_taken_for_other_weights(fake_world):
    model = nn.Linear(1, 1)
    ours = sgd_accumulator(model, TorchGroup.wrap(fake_world))
    ours.backward(Loss(model(torch.ones(1, 1)).sum(), 1))
    with pytest.raises(ReplicasDiffer, match="the transport did not add up what they sent"):
        ours.boundary()


def test_of_a_group_with_several_backends_the_models_device_chooses_one(tmp_path):
    """As of `init_process_group()` on a machine with GPUs: "cpu:gloo,cuda:nccl"."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:fake", store=store, rank=0, world_size=1)
    try:
        on_cpu, on_gpu = transports.group_of_torch("cpu"), transports.group_of_torch("cuda")
        assert (on_cpu.transport, on_cpu.device.type) == ("gloo", "cpu")
        assert (on_gpu.transport, on_gpu.device.type) == ("fake", "cuda")
        assert on_cpu.transport_collectives() == 0  # several backends together have no count
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("visible", "local_rank", "device"),
    [(8, 7, 7), (8, 0, 0), (1, 3, 0), (2, 3, None), (0, 0, None)],
)
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_it_sees(
    visible, local_rank, device, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert transports.gpu_index(local_rank) == device


def test_a_rank_reports_its_gpu_or_why_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def properties(index):
        if index == 1:
            raise RuntimeError("CUDA error: uncorrectable ECC error\nmore")
        return SimpleNamespace(uuid="GPU-5")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    found = [
        transports.read_capabilities(spec(rank, 2, tmp_path, one_node=True)) for rank in range(2)
    ]
    assert [one.gpu.strip() for one in found] == ["GPU-5", ""]
    assert found[1].device_error == "GPU 1: CUDA error: uncorrectable ECC error"


def test_a_rank_that_forms_a_group_alone_prepares_its_device_too(tmp_path, monkeypatch):
    """As one that replaces a lost rank: later groups form in another thread."""
    prepared = []
    monkeypatch.setattr(transports.Gloo, "prepare", prepared.append)
    alone = spec(0, 1, tmp_path)
    form_group(alone)
    assert prepared == [alone]


def test_all_devices_are_seeded_whichever_is_the_current_one(monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    fake = SimpleNamespace(manual_seed_all=seeds.append)
    monkeypatch.setattr(torch, "get_device_module", lambda: fake)
    model._seed_devices.cache_clear()  # asked once a process
    try:
        model.seed_torch(7)
    finally:
        model._seed_devices.cache_clear()
    assert seeds == [7]


def test_nodes_that_accumulate_gradients_stay_the_same_while_hooks_are_registered():
    """Their stream is that of their first use: buckets are sent from the one of the last."""
    layer = nn.Linear(2, 2)
    accumulator = Accumulator(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    nodes = {edge.node for edge in map(get_gradient_edge, layer.parameters())}
    for _ in range(2):
        total = layer(torch.ones(1, 2)).sum()
        assert nodes == {edge.node for edge in map(get_gradient_edge, layer.parameters())}
        accumulator.backward(Loss(total, 1))
        accumulator.boundary()


def test_a_backward_that_a_cuda_graph_captures_is_refused(monkeypatch):
    layer = nn.Linear(2, 2)
    accumulator = Accumulator(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    loss = Loss(layer(torch.ones(1, 2)).sum(), 1)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(JobError, match="captured in a CUDA graph, whose replays run no hook"):
        accumulator.backward(loss)


def test_versions_tell_tf32_however_it_was_set():
    before = torch.backends.fp32_precision
    plain = consistency_checks.versions()
    try:
        torch.backends.fp32_precision = "tf32"
        assert consistency_checks.versions()["matmul"] != plain["matmul"]
    finally:
        torch.backends.fp32_precision = before
    torch.set_float32_matmul_precision("high")
    try:
        assert consistency_checks.versions()["matmul"] != plain["matmul"]
    finally:
        torch.set_float32_matmul_precision("highest")


def test_gloo_refuses_to_exchange_addresses_of_a_device():
    ours = TorchGroup(object(), rank=0, size=2, transport="gloo")
    with pytest.raises(TransportError, match=r"CPU only, but this one is on meta.*transport=nccl"):
        ours.reduce_scatter_sum_async(torch.ones(1, device="meta"), torch.ones(2, device="meta"))


def test_digests_on_a_device_are_those_on_the_cpu(monkeypatch):
    monkeypatch.setattr(consistency_checks, "_ROWS", 2)
    drawn = torch.Generator().manual_seed(0)
    sizes = (7, 7, 7, 3, 7, 1)
    parts = [torch.randint(-(2**31), 2**31, (n,), generator=drawn).int() for n in sizes]
    together = consistency_checks._sums_together(parts)
    whole = [WeightRange(number, 0, size) for number, size in enumerate(sizes)]
    assert [int(one) for one in together] == consistency_checks.digests_of(parts, whole)
