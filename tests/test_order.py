"""The order of files: none is named that is not there, and what takes longest begins."""

import pytest

from tests.helpers import ROOT
from tests.order import CALM, LONG, place_of


@pytest.mark.parametrize("path", [*LONG, *CALM])
def test_what_is_named_is_there(path):
    assert (ROOT / path).exists()


def test_what_takes_longest_begins():
    order = sorted(["tests/plan/test_wire.py", *LONG[::-1]], key=place_of)
    assert order == [*LONG, "tests/plan/test_wire.py"]
