"""Held-out data that cannot be evaluated are refused before the first update."""

import pytest
import torch

from orchestrator import Job, Loss
from orchestrator.errors import ConfigError, JobError
from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.trainer.evaluation import agreed_held_out, joined_figures
from tests.engine.torch.jobs import Curve, engine_of

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
    ("validation", "message"),
    [
        (lambda rank: [], r"HeldOut\.validation\(\) has no samples, so it has no loss; leave"),
        (lambda rank: {"a": DATA, "b": []}, r"HeldOut\.validation\(\)\['b'\] has no samples"),
        (lambda rank: {}, r"must give a data set, or data sets by name"),
        (lambda rank: {"": DATA}, r"or data sets by name, as in .*, but gives names \[''\]"),
        (lambda rank: {3: DATA}, r"but gives names \[3\]"),
        (lambda rank: iter(DATA), r"validation\(\) must give something with len\(\) and \[index\]"),
        (
            lambda rank: torch.utils.data.DataLoader(DATA),
            r"validation\(\) must give the data set, not a DataLoader",
        ),
        (
            lambda rank: DATA if rank else None,
            r"HeldOut\.validation\(\) gives other data sets on rank 1",
        ),
        (
            lambda rank: {"a": list(DATA)[rank:]},
            r"validation\(\)\['a'\] has 29 samples on most ranks, but 28 on rank 1",
        ),
        (
            lambda rank: {"a": list(DATA)[rank : rank + 5]},
            r"validation\(\)\['a'\] is not the same on all ranks: on rank 1 sample 0 differs",
        ),
    ],
)
def test_held_out_data_that_cannot_be_evaluated_are_refused(validation, message):
    with pytest.raises(JobError, match=message):
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
    with pytest.raises(JobError, match=r"two figures of \w+\.validation\(\) would have one name"):
        agreed(lambda rank: data_sets, job=job)
    with pytest.raises(JobError, match=r"evaluate\(\) returns b, which validation\(\) gives as"):
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
    with pytest.raises(JobError, match="also sets talks_in_window: its loss depends on the sam"):
        agreed(lambda rank: DATA, job=Talking)
    job = Contrastive()
    with pytest.raises(JobError, match=r"also defines embed\(\).*in evaluate\(model\), which ran"):
        agreed_held_out(engine_of(job), job)


class Old:
    """An engine that cannot evaluate on all ranks."""

    def gather(self, numbers):
        return [list(numbers)]


def test_an_engine_that_cannot_evaluate_on_all_ranks_is_named():
    with pytest.raises(ConfigError, match="Old cannot evaluate on all ranks"):
        agreed_held_out(Old(), HeldOut(lambda rank: DATA))
