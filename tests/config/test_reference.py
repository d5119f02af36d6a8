"""docs/reference/configuration.md has a row for every key, with its values and its default."""

import re

from orchestrator.config.changes import flat
from orchestrator.config.schema import BOUNDS, Config, plain
from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "reference" / "configuration.md").read_text()
ROWS = {
    key: (values, default)
    for key, values, default in re.findall(
        r"^\| `([\w.]+)` \| (.*?) \| (.*?) \| .+ \|$", PAGE, re.MULTILINE
    )
}


def text_of(value):
    words = {None: "null", True: "true", False: "false"}
    if isinstance(value, dict | list):
        return "empty"
    return words[value] if value is None or isinstance(value, bool) else f"{value}"


def test_every_key_has_a_row_with_its_default_and_no_other_has():
    usual = dict(flat(plain(Config())))
    documented = {key: default for key, (_, default) in ROWS.items()}
    assert {key: text_of(value).removesuffix(".0") for key, value in usual.items()} == documented


def test_every_row_has_the_choices_and_the_bounds_of_its_key():
    for key, bound in BOUNDS.items():
        values = ROWS[key][0]
        if bound.choice:
            assert values == ", ".join(bound.choice)
        for number in (bound.least, bound.above, bound.most):
            assert number is None or f"{number:,.12g}" in values, key
