"""People import from `orchestrator` itself: nothing in the docs reaches deeper than one level."""

import re

import orchestrator
from tests.helpers import ROOT

IMPORT = re.compile(r"^\s*(?:from|import) orchestrator.*$", re.MULTILINE)


def test_documents_import_from_the_public_surface():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [
        (page.name, line)
        for page in pages
        for line in re.findall(
            r"^\s*(?:from|import) orchestrator.*$", page.read_text(), re.MULTILINE
        )
    ]
    assert found
    assert not [(page, line) for page, line in found if re.search(r"orchestrator\.\w+\.", line)]
    names = {
        name.strip().split(" ")[0]
        for _, line in found
        if (listed := re.search(r"from orchestrator import (.*)", line))
        for name in listed[1].split("#")[0].split(",")
    }
    assert names <= set(orchestrator.__all__)
