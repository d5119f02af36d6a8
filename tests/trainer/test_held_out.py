"""Held-out data that cannot be evaluated are refused before the first update."""

import pytest
import torch

from orchestrator import Job, Loss
from orchestrator.errors import ConfigError, JobError
from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.trainer.evaluation import agreed_held_out, joined_figures
from tests.engine.torch.jobs import Curve, engine_of
from tests.refusals import refused

pytestmark = pytest.mark.whole_runs


class HeldOut(Curve):
    """Has the held-out data that a function of the rank gives."""

    def __init__(self, validation, rank=0):
        super().__init__()
        self.held_out, self.rank = validation, rank

    def validation(self):
        return self.held_out(self.rank)


DATA = Curve().dataset()


def agreed(validation, ranks=1, job=HeldOut):
    def rank(group):
        own = job(validation, group.rank)
        return agreed_held_out(engine_of(own, group), own)

    return run_in_threads(ranks, rank)


def test_a_data_set_or_several_by_name_or_none():
    for data in agreed(lambda rank: DATA, ranks=2):
        assert (data.names, len(data)) == (("",), len(DATA))
    [data] = agreed(lambda rank: {"a": DATA, "b": [DATA[3]]})
    assert (data.names, data.lengths) == (("a", "b"), (len(DATA), 1))
    assert torch.equal(data[len(DATA)][0], DATA[3][0])
    assert agreed(lambda rank: None, ranks=2) == [None, None]
    assert agreed_held_out(engine_of(Curve()), Curve()) is None


class Noisy:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return torch.rand(1)


def test_samples_may_draw_random_numbers_whose_place_decides_them():
    assert [data.lengths for data in agreed(lambda rank: Noisy(), ranks=2)] == [(3,), (3,)]


@pytest.mark.parametrize(
    ("validation", "names"),
    [
        (lambda rank: [], "HeldOut.validation() samples"),
        (lambda rank: {"a": DATA, "b": []}, "HeldOut.validation()['b'] samples"),
        (lambda rank: {}, "HeldOut.validation() None"),
        (lambda rank: {"": DATA}, "HeldOut.validation() ['']"),
        (lambda rank: {3: DATA}, "HeldOut.validation() [3]"),
        (lambda rank: iter(DATA), "validation() len() [index]"),
        (
            lambda rank: torch.utils.data.DataLoader(DATA),
            "validation() DataLoader",
        ),
        (
            lambda rank: DATA if rank else None,
            "HeldOut.validation() rank 1",
        ),
        (
            lambda rank: {"a": list(DATA)[rank:]},
            "validation()['a'] 29 28 rank 1",
        ),
        (
            lambda rank: {"a": list(DATA)[rank : rank + 5]},
            "validation()['a'] rank 1 sample 0",
        ),
    ],
)
def test_held_out_data_that_cannot_be_evaluated_are_refused(validation, names):
    with refused(JobError, names):
        agreed(validation, ranks=2)


class Clashing(HeldOut):
    metric_names = ("loss",)

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return Loss(loss.total, loss.weight, {"loss": loss.total})


class Dotted(HeldOut):
    metric_names = ("b.loss", "size")


@pytest.mark.parametrize(
    ("job", "data_sets"), [(Clashing, DATA), (Dotted, {"a": DATA, "a.b": DATA})]
)
def test_figures_of_one_name_are_refused(job, data_sets):
    with refused(JobError, f"{job.__name__}.validation()"):
        agreed(lambda rank: data_sets, job=job)
    with refused(JobError, "evaluate() b validation()"):
        joined_figures({"a": 1.0, "b": 2.0}, {"b": 2.0})
    assert joined_figures({"a": 1.0}, {"b": 2.0}) == {"a": 1.0, "b": 2.0}


class Talking(HeldOut):
    talks_in_window = True


class Contrastive(Job):
    def model(self):
        return torch.nn.Linear(4, 2)

    def dataset(self):
        return DATA

    def validation(self):
        return DATA

    def embed(self, model, batch):
        return model(batch[0])

    def loss_of_embeddings(self, model, embeddings):
        return Loss((embeddings @ embeddings.T).sum(), len(embeddings))


def test_losses_that_depend_on_the_samples_of_other_ranks_are_refused():
    with refused(JobError, "validation() talks_in_window"):
        agreed(lambda rank: DATA, job=Talking)
    job = Contrastive()
    with refused(JobError, "embed() evaluate(model)"):
        agreed_held_out(engine_of(job), job)


class Old:
    """An engine that cannot evaluate on all ranks."""

    def gather(self, numbers):
        return [list(numbers)]


def test_an_engine_that_cannot_evaluate_on_all_ranks_is_named():
    with refused(ConfigError, "validation() Old evaluate(model)"):
        agreed_held_out(Old(), HeldOut(lambda rank: DATA))
