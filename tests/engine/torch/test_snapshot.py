"""A state that is copied while the next window computes is that of the boundary, to the byte."""

import json
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from orchestrator.engine.settings import EngineSettings
from orchestrator.engine.torch import TorchGroup, build_engine, run_in_threads
from orchestrator.engine.torch.snapshot import SMALL
from tests.engine.torch.test_engine import Curve
from tests.engine.torch.test_surviving import train, window

WIDE = SMALL // 4 + 100  # a weight of 4 · WIDE numbers is copied by the thread


class Wide(Curve):
    """With buffers, weights that are shared, and complex ones."""

    def model(self):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, WIDE), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, 4), nn.Linear(4, WIDE),
            nn.Linear(WIDE, 1),
        )  # fmt: skip
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
    """What is written at once of an update's end, and what of a copy that was finished late."""
    settings = EngineSettings(
        optimizer=OPTIMIZERS[optimizer], metric_names=Wide.metric_names, **more
    )
    engine, ranks = build_engine(Wide(), settings, group), group.size
    train(engine, group.rank, ranks, range(2))
    engine.gather_state()
    if group.rank:
        train(engine, group.rank, ranks, [2])
        return None
    at_once = files_of(engine, folder / "at once")
    kept = engine.snapshot()
    one = window(2, 0, ranks)
    engine.begin_window(one)
    for batch, micro_batch in zip(
        engine.batches(one.micro_batches), one.micro_batches, strict=True
    ):
        engine.micro_step(batch, micro_batch)
    taking = threading.Timer(0.2, kept.take)
    taking.start()
    engine.boundary()
    waited = kept.taken.is_set()
    after = files_of(engine, folder / "after") if ranks == 1 else None
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
