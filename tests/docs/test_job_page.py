"""The reference of `Job` has every member with its default, and no other."""

import inspect
from dataclasses import fields

from orchestrator import Job, Loss
from orchestrator.job import COUPLED_METHODS
from tests.docs.scripts import page_text, table

PAGE = page_text("job.md")
OPTIONAL = {"learning_rate", *COUPLED_METHODS}


def _public(of):
    return {name for name, _ in inspect.getmembers(Job, of) if not name.startswith("_")}


def test_the_page_has_every_method_with_its_arguments():
    rows = [row[0].strip("`") for row in table(PAGE, "method")]
    signatures = {row.partition("(")[0]: row.partition("(")[2].rstrip(")") for row in rows}
    assert signatures.keys() == _public(inspect.isfunction) | OPTIONAL
    for name in signatures.keys() - OPTIONAL:
        _, *arguments = inspect.signature(getattr(Job, name)).parameters
        assert signatures[name] == ", ".join(arguments)


def test_the_page_has_every_attribute_with_its_default():
    rows = {name.strip("`"): default.strip("`") for name, default, _ in table(PAGE, "attribute")}
    attributes = _public(lambda value: not callable(value))
    assert rows == {name: repr(getattr(Job, name)).replace("'", '"') for name in attributes}


def test_the_page_has_every_field_of_a_loss():
    assert [row[0].strip("`") for row in table(PAGE, "field")] == [f.name for f in fields(Loss)]
