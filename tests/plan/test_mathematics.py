"""The examples on the page of the mathematics are true."""

import doctest
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "mathematics.md"


def test_the_examples_of_the_page_hold():
    failed, attempted = doctest.testfile(str(PAGE), module_relative=False, encoding="utf-8")
    assert attempted >= 5
    assert failed == 0
