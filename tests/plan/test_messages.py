"""Whole messages of plans; other tests of this area assert what `refused` does."""

import pytest

from orchestrator.config.schema import batch_stages
from orchestrator.errors import UsageError
from orchestrator.plan.cost import deal, lengths_of
from orchestrator.plan.order import DataOrder
from orchestrator.plan.split import split_window

MESSAGES = {
    "accumulation.ragged=drop with accumulation.global_batch=11 leaves nothing of a data set of "
    "10 samples. Set accumulation.global_batch=10 or less, or accumulation.ragged=update or "
    "carry": lambda: DataOrder(dataset_samples=10, global_batch=11, ragged="drop"),
    "the data set has 0 samples; it must have at least 1": (
        lambda: DataOrder(dataset_samples=0, global_batch=1)
    ),
    "accumulation.batch_schedule must increase in updates, but 7 follows 9; try "
    "accumulation.batch_schedule=[[7, 30], [9, 20]]": (lambda: batch_stages([[9, 20], [7, 30]])),
    "accumulation.batch_schedule: [0, 512] is no later update; the batch from update 0 on is "
    "accumulation.global_batch": lambda: batch_stages([[0, 512]]),
    "lengths must be one whole number for each of the 3 samples, in a list or array, but are 2": (
        lambda: lengths_of([1, 2], 3)
    ),
    "lengths must be 0 or more, but sample 1 has -2": lambda: lengths_of([1, -2, 3], 3),
    "2 ranks need as many speeds above 0, but they are [1.0]": lambda: deal([1.0, 2.0], 2, [1.0]),
    "there is no rank 2 among 2: they count from 0": (
        lambda: split_window(4, 2, steps=1).pieces(2)
    ),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_message(message):
    with pytest.raises(UsageError) as caught:
        MESSAGES[message]()
    assert str(caught.value) == message
