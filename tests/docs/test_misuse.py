"""Every row of the table in usage-errors.md is what happens, and every misuse tried has a row."""

import re
from pathlib import Path

import pytest

import tests.docs.habits
import tests.docs.loops  # noqa: F401  # their cases are among CASES
from tests.docs.misuses import CASES, said
from tests.docs.scripts import table

ROWS = dict(table(Path(__file__).with_name("usage-errors.md").read_text(), "what was done"))


def test_every_misuse_has_its_row_and_every_row_its_misuse():
    assert list(ROWS) == list(CASES)


@pytest.mark.parametrize("row", ROWS)
def test_what_the_page_says_is_said(row):
    words = [part.strip() for part in ROWS[row].strip("`").split("…")]
    found = said(CASES[row])
    assert re.search(".*".join(map(re.escape, words)), found, re.DOTALL), found
