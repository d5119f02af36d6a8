"""The order of files: none is named that is not there, and what takes longest begins."""

import re

import pytest

from tests.helpers import ROOT
from tests.order import CALM, LONG, place_of


@pytest.mark.parametrize("path", [*LONG, *CALM])
def test_what_is_named_is_there(path):
    assert (ROOT / path).exists()


def test_what_takes_longest_begins():
    order = sorted(["tests/plan/test_wire.py", *LONG[::-1]], key=place_of)
    assert order == [*LONG, "tests/plan/test_wire.py"]


LIMIT = re.compile(
    r"mark\.timeout\((\d+)\)|\.(?:wait|join|communicate)\((?:timeout=)?(\d+)\)"
    r"|\btimeout=(\d+)\b|monotonic\(\) - \w+ < (\d+)"
)


@pytest.mark.parametrize("path", CALM)
def test_what_is_calm_would_not_notice_half_a_minutes_standstill(path):
    """It may be starved for so long; a limit is only there to end what hangs."""
    named = ROOT / path
    for file in [named] if named.is_file() else named.rglob("*.py"):
        for line in file.read_text().splitlines():
            for found in LIMIT.finditer(line):
                assert int(next(filter(None, found.groups()))) >= 50, f"{file}: {line}"
