"""Counts of collectives and bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import PlanError
from orchestrator.plan.wire import Wire, bucket_count, padded, trailer_numbers
from tests.refusals import refused

COUNTS = {"itemsize": 4, "metric_count": 1}
parameters_ = st.integers(0, 10**10)
ranks_ = st.integers(2, 10_000)


@given(parameters_, ranks_, st.integers(1, 2**30))
def test_buckets_hold_the_payload_and_none_is_empty(parameters, ranks, bucket_bytes):
    each = Wire(**COUNTS, bucket_bytes=bucket_bytes, ranks=ranks).collectives(parameters)
    payload = 4 * (parameters + trailer_numbers(1))
    assert (each - 1) * bucket_bytes < payload <= each * bucket_bytes


@given(parameters_, ranks_)
def test_bytes_on_the_wire_are_the_floor_of_an_all_reduce_rounded_up(parameters, ranks):
    payload = 4 * (parameters + trailer_numbers(1))
    moved = Wire(**COUNTS, ranks=ranks).bytes_sent(parameters)
    assert 0 <= moved * ranks - 2 * (ranks - 1) * payload < ranks
    assert payload <= moved <= 2 * payload


@given(st.integers(1, 10**10), ranks_, st.one_of(st.none(), st.integers(1, 2**30)))
def test_a_sharded_update_sends_every_segment_there_and_back_and_a_row(parameters, ranks, size):
    given = {**COUNTS, "ranks": ranks, "sharded": True}
    calls = Wire(**given, bucket_bytes=size).collectives(parameters)
    buckets, row = divmod(calls, 2)
    numbers = padded(parameters, ranks)
    assert row == 1
    assert 1 <= buckets <= numbers // ranks
    assert parameters <= numbers < parameters + ranks
    assert size is None or numbers // ranks == buckets or 4 * numbers <= size * buckets
    moved = Wire(**given).bytes_sent(parameters)
    assert moved == (ranks - 1) * (2 * 4 * numbers // ranks + 8 * (trailer_numbers(1) + 1))


@pytest.mark.parametrize("parameters", [None, 100])
def test_one_rank_sends_nothing(parameters):
    assert Wire(**COUNTS, bucket_bytes=8, ranks=1).collectives(parameters) == 0
    assert Wire(**COUNTS, ranks=1).bytes_sent(parameters) == 0
    assert Wire(**COUNTS, bucket_bytes=8, ranks=1, sharded=True).collectives(parameters) == 0


def test_an_unknown_model_gives_unknown_counts():
    assert Wire(**COUNTS, bucket_bytes=8, ranks=2).collectives(None) is None
    assert Wire(**COUNTS, ranks=2).bytes_sent(None) is None


def test_a_bucket_below_one_byte_is_refused():
    with refused(PlanError, "bucket 0 1"):
        Wire(**COUNTS, bucket_bytes=0, ranks=2)


@pytest.mark.parametrize(
    ("mib", "early", "late"),
    [
        (1, 1, 1),
        (3, 1, 1),
        (3.5, 2, 1),
        (8, 2, 1),
        (24, 3, 1),
        (40, 5, 2),
        (100, 8, 4),
        (200, 8, 8),
        (216, 9, 9),
        (1000, 40, 40),
    ],
)
def test_buckets_of_no_stated_size_are_two_to_eight_but_neither_small_nor_large(mib, early, late):
    payload = int(mib * 2**20)
    assert [bucket_count(payload, None), bucket_count(payload, None, early=False)] == [early, late]
    assert isinstance(bucket_count(payload, None), int)
    assert bucket_count(0, None) == bucket_count(0, 10) == 1
