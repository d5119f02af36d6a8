"""Batch norm is named, frozen or replaced; the last two give one update for any split."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from orchestrator import Job, Loss
from orchestrator.engine.settings import EngineSettings
from orchestrator.engine.torch import TorchGroup, build_engine
from orchestrator.engine.torch.batch_norm.modes import FrozenBatchNorm, with_norms
from orchestrator.errors import ConfigError, JobError
from tests.jobs.training import difference, train


class Pictures(Job):
    """A small convolutional net with batch norms of both kinds."""

    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
            nn.Linear(8 * 36, 6), nn.BatchNorm1d(6), nn.Linear(6, 1),
        )  # fmt: skip

    def dataset(self):
        made = torch.Generator().manual_seed(3)
        pictures = torch.randn(40, 1, 8, 8, generator=made)
        return TensorDataset(pictures, pictures.flatten(1).sum(1, keepdim=True).sin())

    def loss(self, model, batch):
        x, y = batch
        return Loss(((model(x) - y) ** 2).sum(), weight=len(x))


@pytest.mark.parametrize(
    ("norm", "exact"),
    [("warn", False), ("frozen", True), ("group", True)],
)
def test_frozen_and_group_norms_give_one_update_for_any_split(norm, exact):
    given = {"samples": 12, "updates": 2, "norm": norm}
    (alone, *_), *_ = train(Pictures(), 1, cap=12, **given)
    (found, *_), *_ = train(Pictures(), 2, cap=3, **given)
    trained = {name: value for name, value in alone.items() if value.is_floating_point()}
    assert (difference(found, trained) <= 1e-10) is exact


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        ("warn", "batch norm in 1, 5 sees one micro-batch at a time"),
        ("frozen", "batch norm in 1, 5 keeps the statistics"),
        ("group", "batch norm in 1, 5 was replaced by group norm"),
    ],
)
def test_the_layers_are_named(norm, words):
    engine = build_engine(Pictures(), EngineSettings(norm=norm), TorchGroup.alone())
    assert len(engine.warnings()) == 1
    assert words in engine.warnings()[0]


def test_a_frozen_norm_is_what_batch_norm_is_in_evaluation():
    layer = nn.BatchNorm2d(3)
    layer(torch.randn(8, 3, 2, 2) * 4 + 1)  # statistics of its own
    frozen, _ = with_norms(nn.Sequential(copy.deepcopy(layer)), "frozen")
    x = torch.randn(5, 3, 2, 2)
    assert torch.equal(frozen.train()(x), layer.eval()(x))
    assert frozen.state_dict().keys() == nn.Sequential(layer).state_dict().keys()


def test_a_shared_norm_stays_shared():
    shared = nn.BatchNorm2d(8)
    model, _ = with_norms(nn.Sequential(shared, nn.Conv2d(8, 8, 1), shared), "group")
    assert isinstance(model[0], nn.GroupNorm)
    assert model[0] is model[2]


def test_a_model_that_is_a_norm_itself_is_replaced():
    model, sentences = with_norms(nn.BatchNorm1d(4), "frozen")
    assert isinstance(model, FrozenBatchNorm)
    assert "the model itself" in sentences[0]


def test_what_cannot_be_done_is_refused_with_what_can():
    with pytest.raises(JobError, match="keeps no running statistics"):
        with_norms(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), "frozen")
    with pytest.raises(JobError, match="does not know its number of channels"):
        with_norms(nn.Sequential(nn.LazyBatchNorm2d()), "group")
    with pytest.raises(ConfigError, match=r"engine\.norm=froze"):
        with_norms(nn.Linear(1, 1), "froze")
