"""Ranks compare their data before training: what differs is refused with a name."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import JobError
from orchestrator.job import dataset_of
from orchestrator.local_ranks.threads import run_in_threads
from orchestrator.trainer.same_inputs import agreed_samples, sample_digest
from tests.engine.torch.jobs import Samples

pytestmark = pytest.mark.whole_runs


class Gathers:
    """All that is needed of an engine here."""

    def __init__(self, group):
        self._group = group

    def gather(self, numbers):
        return self._group.all_gather(torch.tensor([numbers], dtype=torch.float64)).tolist()


def _agreed(data_of, ranks=3, augments=True):
    def be(group):
        try:
            return agreed_samples(Gathers(group), data_of(group.rank), augments=augments)
        except JobError as error:
            return str(error)

    return run_in_threads(ranks, be)


@dataclass
class Sample:
    picture: np.ndarray


def _samples():
    numbers = np.arange(12.0).reshape(4, 3)
    return [{"x": torch.tensor(row), "more": Sample(row.astype("f4"))} for row in numbers]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: np.put(data[3]["more"].picture, 1, 0.0), "on rank 1 sample 3 differs from"),
        (lambda data: data[0].update(x=data[0]["x"].float()), "on rank 1 sample 0 differs"),
        (lambda data: data.pop(), "4 samples on most ranks, but 3 on rank 1"),
    ],
)
def test_other_data_on_one_rank_is_refused_by_all(change, message):
    def data_of(rank):
        data = _samples()
        if rank == 1:
            change(data)
        return data

    said = _agreed(data_of)
    assert len(set(said)) == 1
    assert message in said[0]


SEEDED = [lambda _: random.random(), lambda _: np.random.rand(2), lambda _: torch.rand(2)]


def test_samples_that_are_drawn_at_random_are_compared_after_the_same_seeds():
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    data = Samples(lambda index: [draw(index) for draw in SEEDED])
    # One rank, since the ranks of this test would share the generators.
    assert _agreed(lambda _: data, ranks=1) == [6]
    assert torch.equal(torch.rand(1), wanted)  # without any error


@pytest.mark.parametrize("draw", SEEDED)
def test_a_job_that_draws_without_augments_is_warned_of(draw, recwarn):
    assert _agreed(lambda _: Samples(draw), ranks=1, augments=True) == [6]
    assert not recwarn
    assert _agreed(lambda _: Samples(draw), ranks=1, augments=False) == [6]
    assert "does not set augments = True" in str(recwarn.pop(UserWarning).message)


def test_samples_that_no_seed_reaches_are_warned_of(recwarn):
    made = np.random.default_rng()
    assert _agreed(lambda _: Samples(lambda _: made.random()), ranks=2) == [6, 6]
    assert "by random numbers that no seed reaches" in str(recwarn.pop(UserWarning).message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (iter(()), "without len()"),
        (torch.utils.data.DataLoader([1, 2]), "must give the data set, not a DataLoader"),
    ],
)
def test_what_is_no_data_set_is_refused(given, message):
    assert message in _agreed(lambda _: given, ranks=1)[0]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=8,
)


@settings(max_examples=50)
@given(values, values)
def test_values_are_told_apart_and_equal_ones_are_not(one, other):
    assert sample_digest(one) == sample_digest(one)
    assert (sample_digest(one) == sample_digest(other)) == (repr(one) == repr(other))


def test_the_data_set_is_built_once_also_where_the_job_calls_it_with_arguments_of_its_own():
    class Counted:
        built = 0

        def dataset(self, part="train"):
            self.built += 1
            return [part]

    job = Counted()
    assert dataset_of(job) is dataset_of(job)
    assert (job.dataset("test"), job.built) == (["test"], 2)
