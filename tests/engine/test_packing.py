"""What a state may hold, and gets back."""

import math

import numpy as np
import pytest

from orchestrator.engine.common.packing import pack, unpack
from orchestrator.errors import JobError


@pytest.mark.parametrize(
    "value",
    [
        *(0.1, 7, True, None, "text"),
        *(np.float16(0.5), np.float32(0.1), np.float64(0.1)),
        *(np.int64(-7), np.uint8(200), np.bool_(True)),
        (1, [2.5, np.float32(1e-30)]),
        {"a": {3: np.int32(4)}},
    ],
)
def test_numbers_come_back_with_their_types(value):
    packed = unpack(pack(value, {}, "", bytes), {})
    assert (repr(packed), type(packed)) == (repr(value), type(value))


def test_infinity_is_kept_and_what_needs_pickling_refused():
    assert math.isinf(unpack(pack(np.float32("inf"), {}, "", bytes), {}))
    for value in (np.longdouble(1), np.arange(3), {1, 2}, np.datetime64(0, "s")):
        with pytest.raises(JobError, match="without pickling"):
            pack({"lr": value}, {}, "", bytes)
