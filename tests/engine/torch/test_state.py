"""State on disk, and snapshots of it."""

import json
import threading
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model as load_safetensors
from safetensors.torch import save_file
from torch import nn

from orchestrator.engine.torch import TorchGroup
from orchestrator.engine.torch.state import (
    OPTIMIZER,
    SMALL,
    WEIGHTS,
    Snapshot,
    load_model,
    load_optimizer,
    load_weights,
    pack,
    restore_optimizer,
    unpack,
    weights_sha256,
)
from orchestrator.errors import JobError, RunFolderError
from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.plan.split import split_leaves
from tests.engine.torch.jobs import Curve, engine_of
from tests.engine.windows import compute, run, window_of


class Counted(nn.Module):
    def get_extra_state(self):
        return {"calls": 3, "scale": torch.tensor([1.5])}

    def set_extra_state(self, state):
        self.restored = state


class Everything(nn.Module):
    """Tied, complex, half, empty, scalar, strided and integer tensors, a buffer, extra state."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.output = nn.Linear(4, 5)
        self.output.weight = self.embedding.weight
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.short = nn.Parameter(torch.randn(4).bfloat16())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.strided = nn.Parameter(torch.randn(4, 3).t())
        self.register_buffer("count", torch.tensor(3))
        both = torch.randn(6)
        self.counted = Counted()
        self.register_buffer("low", both[:3])
        self.register_buffer("high", both[3:])


def _save(model, optimizer, folder):
    """Save both; return what load_model and load_optimizer take besides the files."""
    extra = Snapshot(model, optimizer.state_dict() if optimizer else {}, {}).save_state(folder)
    extra = json.loads(json.dumps(extra))
    return extra["model"], extra["optimizer"]


def _load(optimizer, folder, packed):
    load_optimizer(
        folder, packed, lambda saved: restore_optimizer(optimizer, saved), {"": optimizer}
    )


def _trained(kind, **settings):
    torch.manual_seed(0)
    model = Everything()
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    _step(model, optimizer)
    return model, optimizer


def _step(model, optimizer):
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 0.1 * (number + 1))
    optimizer.step()


def test_files_have_one_entry_beside_the_tensors_so_their_bytes_repeat(tmp_path):
    """Of several the library's order is another one in each process."""
    _save(Everything(), None, tmp_path)
    with safe_open(tmp_path / WEIGHTS, framework="pt") as opened:
        assert len(opened.metadata()) == 1


KINDS = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"weight_decay": 0.1}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
]


@pytest.mark.parametrize(
    ("kind", "settings"), KINDS, ids=lambda value: getattr(value, "__name__", "")
)
def test_training_continues_with_the_same_bits_after_a_round_trip(tmp_path, kind, settings):
    model, optimizer = _trained(kind, **settings)
    rest, packed = _save(model, optimizer, tmp_path)
    torch.manual_seed(1)
    other = Everything()
    theirs = kind(other.parameters(), lr=0.5, **settings)
    load_model(other, tmp_path, rest)
    _load(theirs, tmp_path, packed)
    assert other.output.weight is other.embedding.weight
    assert other.counted.restored == {"calls": 3, "scale": torch.tensor([1.5])}
    assert theirs.param_groups[0]["lr"] == 0.1
    for _ in range(3):
        assert weights_sha256(other) == weights_sha256(model)
        _step(model, optimizer)
        _step(other, theirs)


def _compiled(whole):
    """Return a model that is compiled itself, or with compiled layers."""
    model = Everything()
    if whole:
        return torch.compile(model)
    model.counted, model.output = torch.compile(model.counted), torch.compile(model.output)
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_checkpoint_fits_whether_the_model_is_compiled_or_not(tmp_path, compiled_first, whole):
    models = [_compiled(whole), Everything()]
    model, other = models if compiled_first else reversed(models)
    rest, _ = _save(model, None, tmp_path)
    load_model(other, tmp_path, rest)
    assert weights_sha256(other) == weights_sha256(model)
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    with safe_open(tmp_path / WEIGHTS, framework="pt") as opened:
        assert {*opened.keys()} <= {*Everything().state_dict(), "counted._extra_state.scale"}


def test_restored_state_has_the_strides_of_its_parameter_as_fused_kernels_want_it(tmp_path):
    torch.manual_seed(0)
    net = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    gradient = torch.randn_like(net.weight)

    def step():
        net.weight.grad = gradient
        optimizer.step()
        return net.weight.detach().clone()

    before = step()
    _, packed = _save(net, optimizer, tmp_path)
    undisturbed = step()
    net.weight.data.copy_(before)
    _load(optimizer, tmp_path, packed)
    assert step().equal(undisturbed)


def test_state_wider_than_its_parameter_is_not_rounded(tmp_path):
    parameter = nn.Parameter(torch.zeros(3).bfloat16())
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    exact = torch.tensor([1.0 + 2**-20, 3.0, 1 / 3])
    optimizer.state[parameter] = {"momentum_buffer": exact.clone()}
    _, packed = _save(nn.ParameterList([parameter]), optimizer, tmp_path)
    optimizer.state[parameter] = {}
    _load(optimizer, tmp_path, packed)
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], exact)


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, 2.5, None, True), "b": [{"c": "x"}], 3: {}},
        {"rates": [0.1, float("inf"), float("-inf")], "big": 2**80},
    ],
)
def test_values_survive_packing(value):
    assert unpack(json.loads(json.dumps(pack(value, {}, ""))), {}) == value


def test_tensors_whose_paths_are_the_same_text_are_kept_apart():
    value, tensors = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "1": [torch.ones(2)]}, {}
    value[1] = [torch.zeros(2)]
    found = unpack(json.loads(json.dumps(pack(value, tensors, ""))), tensors)
    assert len(tensors) == 4
    assert str(found) == str(value)


def test_what_would_need_pickling_is_refused():
    with pytest.raises(JobError, match=r"the state at 'a\.b' holds a set"):
        pack({"a": {"b": {1}}}, {}, "")


def test_another_models_or_optimizers_state_is_refused(tmp_path):
    model, optimizer = _trained(torch.optim.Adam)
    rest, packed = _save(model, optimizer, tmp_path)
    other = nn.Linear(2, 2)
    with pytest.raises(RunFolderError, match="is of another model"):
        load_model(other, tmp_path, rest)
    with pytest.raises(RunFolderError, match="is of another optimizer"):
        _load(torch.optim.Adam(other.parameters()), tmp_path, packed)


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER])
def test_damaged_and_missing_files_are_refused(tmp_path, name):
    model, optimizer = _trained(torch.optim.Adam)
    rest, packed = _save(model, optimizer, tmp_path)

    def load():
        load_model(model, tmp_path, rest)
        _load(optimizer, tmp_path, packed)

    load()
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:50])
    with pytest.raises(RunFolderError, match="cannot be read"):
        load()
    (tmp_path / name).unlink()
    with pytest.raises(RunFolderError, match="cannot be read"):
        load()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.middle = (nn.Linear(3, 3) for _ in range(3))
        self.last.weight = self.middle.weight = self.first.weight


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
@pytest.mark.parametrize("kept", ["first.weight", "last.weight", "middle.weight"])
@pytest.mark.parametrize("compiled", ["file", "model"])
def test_initial_weights_fit_whether_compiled_or_not_and_with_one_name_of_a_shared_one(
    tmp_path, compiled, kept
):
    model, prefix = Tied(), "_orig_mod." * (compiled == "file")
    names = [name for name in model.state_dict() if name == kept or not name.endswith("weight")]
    saved = {f"{prefix}{name}": model.state_dict()[name].clone() for name in names}
    save_file(saved, tmp_path / "weights.safetensors")
    other = Tied()
    load_weights(
        torch.compile(other) if compiled == "model" else other, tmp_path / "weights.safetensors"
    )
    assert all(map(torch.equal, other.parameters(), model.parameters()))


def test_the_documented_way_to_load_weights_knows_names_that_share_memory(tmp_path):
    model, other = Tied(), Tied()
    _save(model, None, tmp_path)
    load_safetensors(other, tmp_path / "weights.safetensors")
    assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))


# ------------------------------------------------------------------ Snapshots


WIDE = SMALL // 4 + 100  # a weight of 4 · WIDE numbers is copied by the thread


class Wide(Curve):
    """With buffers, weights that are shared, and complex ones."""

    def model(self):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, WIDE),
            nn.BatchNorm1d(WIDE),
            nn.Linear(WIDE, 4),
            nn.Linear(4, WIDE),
            nn.Linear(WIDE, 1),
        )
        model[3].weight = model[0].weight
        model.register_parameter("wave", nn.Parameter(torch.ones(WIDE * 4, dtype=torch.cfloat)))
        return model

    def loss(self, model, batch):
        found = super().loss(model, batch)
        waves = torch.view_as_real(model.wave).square().sum()
        return replace(found, total=found.total + 1e-3 * found.weight * waves)


OPTIMIZERS = {
    "sgd": {"name": "sgd", "momentum": 0.9},
    "adam": {"name": "adam"},
    "adamw": {"name": "adamw", "amsgrad": True},
}


def files_of(state, folder):
    folder.mkdir()
    extra = state.save_state(folder)
    return json.dumps(extra), {path.name: path.read_bytes() for path in folder.iterdir()}


def compare(group, optimizer, folder, **more):
    """Compare a state written at the end of an update with a copy that was completed later."""
    engine = engine_of(Wide(), group, optimizer=OPTIMIZERS[optimizer], **more)
    split = split_leaves(28, group.size, 4)
    *before, last = (window_of(split, group.rank, update) for update in range(3))
    run(engine, before)
    engine.gather_state()
    if group.rank:
        run(engine, [last])
        return None
    at_once = files_of(engine, folder / "at once")
    kept = engine.snapshot()
    compute(engine, last)
    taking = threading.Timer(0.2, kept.take)
    taking.start()
    engine.boundary()
    waited = kept.taken.is_set()
    after = files_of(engine, folder / "after") if group.size == 1 else None
    return waited, at_once, files_of(kept, folder / "late"), after


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_copy_that_is_taken_late_has_the_bytes_of_the_boundary(optimizer, tmp_path):
    waited, at_once, late, after = compare(TorchGroup.alone(), optimizer, tmp_path)
    assert waited, "the optimizer did not wait for the copy"
    assert late == at_once
    assert after[1]["weights.safetensors"] != at_once[1]["weights.safetensors"]


def test_of_shards_the_gathered_state_is_written(tmp_path):
    (waited, *found, _), _ = run_in_threads(
        2, lambda group: compare(group, "adam", tmp_path, shard_optimizer=True)
    )
    assert waited
    assert found[0] == found[1]
