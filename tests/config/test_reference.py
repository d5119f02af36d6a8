"""docs/reference/configuration.md is made of the schema, and says something of every key."""

from orchestrator.config.reference import MEANINGS, keys, markdown
from tests.helpers import ROOT


def test_every_key_has_a_sentence_in_meanings_and_no_other_has():
    assert {key for key, _ in keys()} == set(MEANINGS)


def test_the_page_is_current():
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text()
    assert page == markdown(), (
        "python -m orchestrator.config.reference > docs/reference/configuration.md"
    )
