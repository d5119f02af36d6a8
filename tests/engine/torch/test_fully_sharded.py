"""Models that `fully_shard` has sharded: exact updates, one reduction between copies a window."""

import math
import os
import resource
import shutil
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss
from orchestrator.client.checkpoint_manager import CheckpointManager
from orchestrator.client.run import CurrentRun
from orchestrator.engine.torch import Accumulator, form_group
from orchestrator.errors import ConfigError, JobError, NonFiniteError, ReplicasDiffer, SilenceError
from orchestrator.local_ranks.processes import run_ranks, spec
from orchestrator.report.compare import compare
from orchestrator.rundir.checkpoints import part_name
from orchestrator.rundir.tensors import SafetensorsFile
from tests.engine.torch.jobs import engine_of
from tests.engine.windows import make_window, run
from tests.refusals import refused

SAMPLES, UPDATES = 24, 3
SIZES = ([2, 3, 1], [1, 1, 4], [4, 3], [2, 3])
"""Micro-batches of four ranks: those of the first copy on a mesh of 2 x 2 have three, of the second
two."""


def _net(dtype=torch.float64):
    torch.manual_seed(0)
    sizes = ((10, 17), (17, 13), (13, 5))  # none is a multiple of the ranks
    return nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in sizes)).to(dtype)


def _data(dtype=torch.float64):
    seeded = torch.Generator().manual_seed(3)
    return torch.randn(UPDATES, SAMPLES, 10, generator=seeded, dtype=torch.float64).to(dtype)


def _optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def _sharded(shape, group, folder, dtype=torch.float64, **more):
    if not dist.is_initialized():
        where = f"file://{folder}/met"
        dist.init_process_group("gloo", init_method=where, rank=group.rank, world_size=group.size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    net = _net(dtype)
    for layer in net:
        fully_shard(layer, mesh=mesh, **more)
    return fully_shard(net, mesh=mesh, **more), mesh


def _micro_batches(rank, shape):
    """Return a rank's samples, and 0 or 1 for each micro-batch: all ranks of a copy have equally
    many.
    """
    first = sum(sum(sizes) for sizes in SIZES[:rank])
    found = []
    for size in SIZES[rank]:
        found.append((slice(first, first + size), 1))
        first += size
    wide = shape[-1]
    copy = SIZES[rank // wide * wide : rank // wide * wide + wide]
    return found + [(slice(0, 1), 0)] * (max(map(len, copy)) - len(found))


def _updates(accumulator, net, rank, shape, dtype=torch.float64, updates=range(UPDATES)):
    reports = []
    for update in updates:
        for samples, counts in _micro_batches(rank, shape):
            batch = _data(dtype)[update][samples]
            total = net(batch).square().sum() * counts
            accumulator.backward(Loss(total, len(batch) * counts))
        reports.append(accumulator.boundary())
    return reports


def _whole(net):
    return [parameter.full_tensor().detach().numpy() for parameter in net.parameters()]


def _one_process(updates=UPDATES):
    net = _net()
    optimizer, norms = _optimizer(net), []
    for batch in _data()[:updates]:
        optimizer.zero_grad()
        (net(batch).square().sum() / SAMPLES).backward()
        norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()], norms


def _farthest(found, wanted):
    pairs = zip(found, wanted, strict=True)
    return max(float(np.linalg.norm(a - np.asarray(b)) / np.linalg.norm(b)) for a, b in pairs)


WAYS = [
    ((2, 2), "float64", 1e-12),
    ((4,), "float64", 1e-12),
    ((4, 1), "float64", 1e-12),
    ((2, 2), "float32", 1e-6),
]


def _trained(group, folder, shape, precision):
    dtype = torch.float64 if precision == "float64" else torch.float32
    net, _ = _sharded(shape, group, folder, dtype)
    accumulator = Accumulator(net, _optimizer(net), clip_norm=0.5)
    reports = _updates(accumulator, net, group.rank, shape, dtype)
    accumulator.check_replicas()
    sent = [(report.collectives, report.bytes_on_wire) for report in reports]
    return _whole(net), [report.gradient_norm for report in reports], sent, accumulator.sharded


@pytest.mark.parametrize(("shape", "precision", "bound"), WAYS, ids=str)
def test_an_update_is_that_of_one_big_batch(ranks, shape, precision, bound):
    wanted, norms = _one_process()
    for weights, found, sent, sharded in (rank["updates"][shape, precision] for rank in ranks):
        assert _farthest(weights, wanted) <= bound
        assert found == pytest.approx(norms, rel=max(bound, 1e-11))
        assert sharded
        between = len(shape) == 2  # one reduction between copies, and the gather of rows
        assert [collectives for collectives, _ in sent] == [1 + between] * UPDATES


def _with_idle_copy(group, folder):
    """The second copy has no micro-step at all."""
    net, _ = _sharded((2, 2), group, folder)
    accumulator = Accumulator(net, _optimizer(net), clip_norm=0.5)
    for update in range(UPDATES):
        accumulator.optimizer.zero_grad()  # as in many loops, and not needed
        if group.rank < 2:
            half = slice(group.rank * 12, group.rank * 12 + 12)
            accumulator.backward(Loss(net(_data()[update][half]).square().sum(), 12))
        accumulator.boundary()
    return _whole(net)


def test_a_copy_may_be_idle(ranks):
    wanted, _ = _one_process()
    assert all(_farthest(rank["idle"], wanted) <= 1e-12 for rank in ranks)


def _in_bfloat16(group, folder):
    """Compute in bfloat16; reduce, add up and step in float32, as FSDP's policy says."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net, _ = _sharded((2, 2), group, folder, torch.float32, mp_policy=policy)
    accumulator = Accumulator(net, torch.optim.SGD(net.parameters(), lr=0.1))
    _updates(accumulator, net, group.rank, (2, 2), torch.float32, range(1))
    return _whole(net), [parameter.to_local().dtype for parameter in net.parameters()]


def test_a_policy_of_mixed_precision_is_kept(ranks):
    net = _net()
    net(_data()[0]).square().sum().backward()
    wanted = [p.detach() - 0.1 * p.grad / SAMPLES for p in net.parameters()]
    for found, dtypes in (rank["bfloat16"] for rank in ranks):
        assert _farthest(found, wanted) <= 1e-2
        assert set(dtypes) == {torch.float32}


def _refusals(group, folder):
    net, mesh = _sharded((2, 2), group, folder)
    said = []

    def refused(net, **more):
        with pytest.raises(ConfigError) as caught:
            Accumulator(net, _optimizer(net), **more)
        said.append(str(caught.value))

    refused(net, shard_optimizer=True)
    part = _net()
    fully_shard(part[0], mesh=mesh)
    refused(part)
    refused(fully_shard(_net(), mesh=mesh["shards"]))
    accumulator = Accumulator(net, _optimizer(net))
    refused(net)
    accumulator.backward(Loss(net(_data()[0][:2]).square().sum(), 2))
    dist.all_reduce(torch.ones(1), group=mesh.get_group(0))
    with pytest.raises(SilenceError) as caught:
        accumulator.boundary()
    said.append(str(caught.value))
    return said


def test_what_cannot_be_served_is_refused(ranks):
    words = (
        "takes reduction='fast'",
        "parameter 1.0.weight is not sharded, but others are",
        r"sharded over a mesh of shape (2,), but there are 4 ranks",
        "belongs to another accumulator",
        "1 collectives ran between the copies of the model in mid-window",
    )
    for rank in ranks:
        for sentence, word in zip(rank["refusals"], words, strict=True):
            assert word in sentence


def _not_finite(group, folder):
    net, _ = _sharded((2, 2), group, folder)
    accumulator = Accumulator(net, _optimizer(net))
    before = _whole(net)
    total = net(_data()[0][:2]).square().sum()
    if group.rank == 3:
        total = total + (total * 0.0).sqrt()  # 0, with a gradient of 0 times infinity
    accumulator.backward(Loss(total, 2))
    with pytest.raises(NonFiniteError) as caught:
        accumulator.boundary()
    assert _farthest(_whole(net), before) == 0
    return str(caught.value)


def test_a_gradient_that_is_not_finite_stops_all_ranks_alike(ranks):
    [said] = {rank["not finite"] for rank in ranks}
    assert "0.0.weight" in said


def _disagreeing(group, folder, what):
    """Return what building an accumulator, or comparing copies later, says on this rank."""
    net, _ = _sharded((4,) if what == "decay" else (2, 2), group, folder)
    shard = next(net.parameters()).to_local()
    optimizer = _optimizer(net)
    if group.rank == 3 and what == "decay":
        optimizer.param_groups[0]["weight_decay"] = 0.2
    if group.rank == 3 and what == "start":
        shard.detach().add_(1)
    try:
        accumulator = Accumulator(net, optimizer, group)
        if group.rank == 3:
            shard.detach().add_(1)
        accumulator.check_replicas()
    except (JobError, ReplicasDiffer) as error:
        return str(error), getattr(error, "ranks", None)
    return None


def test_differing_copies_or_settings_fail_every_rank(ranks):
    start, decay, later = zip(*(rank["disagreeing"] for rank in ranks), strict=True)
    for text, _ in start[1::2]:
        assert "rank 3 differs" in text
        assert "numbers of 0.0.weight" in text
    for text, _ in start[::2]:
        assert "the shards of ranks 1, 3 are not the same in all copies" in text
    assert all("weight_decay" in text and "rank 3" in text for text, _ in decay)
    assert [found for _, found in later] == [(3,)] * 4


def _all(group, folder):
    return {
        "refusals": _refusals(group, folder),
        "updates": {way[:2]: _trained(group, folder, *way[:2]) for way in WAYS},
        "idle": _with_idle_copy(group, folder),
        "bfloat16": _in_bfloat16(group, folder),
        "not finite": _not_finite(group, folder),
        "disagreeing": [_disagreeing(group, folder, what) for what in ("start", "decay", "later")],
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Return the results of four processes, which meet once for all checks."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(4, folder, _all, folder)


# ------------------------------------------------------------------ job classes


class _InParts(Job):
    """Its loss calls parts of the model, not the model."""

    def model(self):
        return _net(torch.float32)

    def dataset(self):
        return TensorDataset(_data(torch.float32)[0])

    def loss(self, model, batch):
        return Loss(model[1](model[0](batch[0])).square().sum(), len(batch[0]))


class _InPartsOfItsOwn(_InParts):
    def shard(self, model, mesh):
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)


class _NotSharded(_InParts):
    def shard(self, model, mesh):
        del model, mesh


class _Of(_InParts):
    def __init__(self, model):
        self.model = model


def _engines(group, folder):
    group = form_group(spec(group.rank, group.size, folder))
    said = []
    refused = (
        _NotSharded(),
        _Of(lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)),
        _Of(lambda: nn.ParameterList([torch.tensor(1.0)])),
        _Of(lambda: nn.Sequential(_net(torch.float32), _net(torch.float64))),
        _Of(lambda: nn.Embedding(4, 2, sparse=True)),
    )
    for job in (_InParts(), *refused, _InPartsOfItsOwn()):
        try:
            [report] = run(engine_of(job, group, shard_model="all"), [make_window(0, [(0, 4)])])
            said.append(report.applied)
        except (ConfigError, JobError) as error:
            said.append(str(error))
    return said


def test_a_job_may_shard_its_model_itself(tmp_path):
    [[in_parts, *refused, own]] = run_ranks(1, tmp_path, _engines, tmp_path)
    assert "define shard(self, model, mesh)" in in_parts
    not_sharded, strided, scalar, two_types, sparse = refused
    assert "_NotSharded.shard() did not call fully_shard()" in not_sharded
    assert "parameter weight has strides (27, 1, 9, 3) (channels_last, perhaps)" in strided
    assert "parameter 0 is a single number" in scalar
    assert "has got torch.float32 and torch.float64" in two_types
    assert "sparse gradients, as of the model itself" in sparse
    assert own is True


class _Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += self.training
        return super().forward(x)

    def get_extra_state(self):
        return {"calls": self.calls, "at": torch.tensor([self.calls])}

    def set_extra_state(self, state):
        assert int(state["at"]) == state["calls"]
        self.calls = state["calls"]


class _Whole(_InParts):
    """Its loss calls the model as a whole."""

    def loss(self, model, batch):
        return Loss(model(batch[0]).square().sum(), len(batch[0]))


class _Counted(_Whole):
    def model(self):
        torch.manual_seed(0)
        return _Counting(10, 3)


def _behind(group, folder):
    first = form_group(spec(group.rank, 2, folder / "first"))
    engine = engine_of(_Counted(), first, shard_model="node")
    before = {name: engine.model.state_dict()[name].clone() for name in ("weight", "bias")}
    run(engine, [make_window(0, [(0, 4)])])
    if group.rank == 1:  # as if it had been built now
        engine.model.load_state_dict({**before, "_extra_state": {"calls": 0, "at": 0}})
        engine.accumulator.optimizer.state.clear()
    again = form_group(spec(group.rank, 2, folder / "again"))
    engine.catch_up(again, 1 - group.rank, "")
    engine.regroup(again)
    run(engine, [make_window(1, [(0, 4)])])
    return engine.model.calls, engine.model.weight.full_tensor().tolist()


def test_a_rank_behind_gets_shards_and_extra_state_of_another_copy(tmp_path):
    for name in ("first", "again"):
        (tmp_path / name).mkdir()
    one, other = run_ranks(2, tmp_path, _behind, tmp_path)
    assert one == other
    assert one[0] == 2, "each update calls it once"


class _Tied(_Whole):
    def model(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10))
        net[2].weight = net[0].weight
        return net


def _saved_with_ties(group, folder):
    group = form_group(spec(group.rank, group.size, folder))
    found = []
    for over in ("all", "none"):
        engine = engine_of(_Tied(), group, shard_model=over)
        if over == "all":
            run(engine, [make_window(0, [(0, 4)])])
            extra = engine.save_state(folder)
        engine.load_state(folder, extra)
        run(engine, [make_window(1, [(0, 4)])])
        found.append(engine.weights_sha256())
        engine.accumulator.close()
    return found


def test_shards_that_are_tied_are_saved_and_fit_a_whole_model(tmp_path):
    [[sharded, whole]] = run_ranks(1, tmp_path, _saved_with_ties, tmp_path)
    assert sharded == whole


# ------------------------------------------------------------------ run.windows and checkpoints


class _Shadow:
    """A copy of the weights, as moving averages are one."""

    def __init__(self, net):
        self.kept = {name: p.detach().clone() for name, p in net.named_parameters()}

    def state_dict(self):
        return self.kept

    def load_state_dict(self, saved):
        for name, kept in self.kept.items():
            kept.copy_(saved[name])

    def is_of(self, net):
        both = zip(self.kept.values(), net.parameters(), strict=True)
        return all(_local(kept).equal(_local(p.detach())) for kept, p in both)


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _windows(group, folder, shape, checkpoints, updates):
    """Train on 23 samples in windows of 10: ranks have different numbers of micro-batches."""
    net = _net() if shape is None else _sharded(shape, group, folder)[0]
    shadow = _Shadow(net)
    accumulator = Accumulator(net, _optimizer(net), group if shape is None else None, clip_norm=0.5)
    data = _data().reshape(-1, 10)[:23]
    begin = partial(
        CurrentRun({}).windows,
        len(data),
        accumulator,
        global_batch=10,
        micro_batch=2,
        updates=updates,
        checkpoints=checkpoints,
        state={"shadow": shadow},
    )
    if shape is not None:
        before = _whole(net)
        with refused(ConfigError, "balance 'measured' fully_shard()"):
            begin(balance="measured")
        assert all(map(np.array_equal, _whole(net), before)), "nothing was restored"
    windows = begin()
    assert shadow.is_of(net)
    first, lengths, ahead = windows.first, [], windows.indices()
    for window in windows:
        lengths.append((len(window), len(window) - window.planned.padding))
        for indices in window:
            assert indices == next(ahead)
            batch = data[indices]
            accumulator.backward(Loss(net(batch).square().sum(), len(batch)))
        report = accumulator.boundary()
        assert report.weight == window.samples
        shadow.load_state_dict({name: p.detach() for name, p in net.named_parameters()})
    assert next(ahead, None) is None
    plain = [p.detach().numpy() for p in net.parameters()] if shape is None else None
    return plain or _whole(net), first, lengths


def _check_files(folder, weights, merged):
    """Check the parts of a checkpoint: what DCP and tools without torch read from them."""
    parts = [part_name(0), part_name(1)]
    assert sorted(path.name for path in folder.iterdir()) == [*parts, "state.json"]
    # Each rank has written its own part only, and together they have written everything once.
    numbers = sum(weight.size for weight in weights)
    held = [sum(t.numel() for t in load_file(folder / name).values()) for name in parts]
    assert max(held) < 3 * numbers < sum(held) < 4.1 * numbers
    names = [name for name, _ in _net().named_parameters()]
    both = list(zip(names, weights, strict=True))
    found = {f"model.{name}": torch.empty(w.shape).double() for name, w in both}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    SafetensorsFile(folder).write(merged)
    whole = load_file(merged)
    for name, weight in both:
        assert np.array_equal(found[f"model.{name}"], weight)
        assert np.array_equal(whole[name], weight)
    assert compare(folder, merged).equal_bits


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_windows_keep_a_copy_in_step_and_checkpoints_fit_any_number_of_ranks(tmp_path):
    kept = tmp_path / "kept"

    def train(name, shape, updates):
        folder = tmp_path / name
        folder.mkdir()
        checkpoints = shutil.copytree(kept, folder / "checkpoints") if kept.exists() else kept
        ranks = math.prod(shape or (1,))
        return run_ranks(ranks, folder, _windows, folder, shape, str(checkpoints), updates)

    [(wanted, _, _)] = train("alone", None, 6)
    shutil.rmtree(kept)
    begun = train("begun", (2, 2), 4)
    lengths = [[length for length, _ in counts] for _, _, counts in begun]
    padded = sum(length - own for _, _, counts in begun for length, own in counts)
    assert lengths[0] == lengths[1]
    assert lengths[2] == lengths[3]
    assert padded > 0
    _check_files(kept / "update-000000004", begun[0][0], tmp_path / "whole.safetensors")
    for name, shape in {"pair": (1, 2), "three": (1, 3), "plain": None}.items():
        for weights, first, _ in train(name, shape, 6):
            assert first == 4
            assert _farthest(weights, wanted) <= 1e-12


def _saves(group, folder, background):
    """Save after updates 1, 2 and 3; the second time rank 1 cannot write its part."""
    engine = engine_of(_InPartsOfItsOwn(), group, shard_model="all")
    checkpoints = CheckpointManager(folder, engine, run=None, keep=9, background=background)
    assert checkpoints.restore(group.rank) is None
    limits, found = resource.getrlimit(resource.RLIMIT_FSIZE), []
    for update in range(3):
        run(engine, [make_window(update, [(0, 4)], samples=8)])
        if update == 1 and group.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        checkpoints.collect(update + 1, 4)
        if group.rank == 0:
            checkpoints.on_checkpoint(update + 1, 4)
        checkpoints.complete_parts(wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        found.append((sorted(path.name for path in folder.glob("*update*")), checkpoints.unsaved))
    digest = engine.weights_sha256()
    checkpoints.collect(4, 4)  # as if the group broke before this one was complete
    part = checkpoints._part
    checkpoints.drop_parts()
    engine.gather(part.row(wait=True))  # it must not write while the rest is checked
    saved = CheckpointManager(folder, engine, run=None, keep=9)
    again, restored = saved.restore(group.rank), engine.weights_sha256()
    if group.rank == 0:  # rank 1 will read that part
        with (folder / "update-000000003" / part_name(1)).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff" if file.read(1) != b"\xff" else b"\0")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        before = saved.restore(group.rank)
    said = [str(one.message) for one in warned]
    return found, again, digest, restored, list(folder.glob(".partial*")), before, said


@pytest.mark.parametrize("background", [False, True])
def test_a_part_that_cannot_be_written_costs_that_checkpoint_alone(tmp_path, background):
    first, second = run_ranks(2, tmp_path, _saves, tmp_path, background)
    saves, again, before, restored, partial, earlier, said = first
    [(one, none), (two, unsaved), (three, after)] = saves
    assert (one, none) == (["update-000000001"], None)
    assert two == one
    assert "the checkpoint after update 2 could not be written" in unsaved
    assert (three, after) == (["update-000000001", "update-000000003"], None)
    assert again == second[1] == (3, 4)
    assert len(before) == 64
    assert before == restored
    assert second[2:4] == ("", "")
    assert partial == []
    assert earlier == second[5] == (1, 4)
    [sentence] = said
    assert "part-00001.safetensors is damaged" in sentence
    assert "going on from an earlier checkpoint" in sentence
