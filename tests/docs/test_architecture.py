"""docs/architecture.md names files that are there, in the folders that it says."""

import re
import subprocess

from tests.helpers import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text()
WHERE = TEXT.split("## Where things live")[1].split("\n## ")[0]
FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT, capture_output=True, text=True, check=True,
).stdout.split()  # fmt: skip


def named(text):
    """Each file that a text names in backticks."""
    return re.findall(r"`([\w/]+\.(?:py|toml))", text)


def test_every_file_that_is_named_is_there():
    assert not [
        name for name in named(TEXT) if not any(f"/{f}".endswith(f"/{name}") for f in FILES)
    ]


def test_a_folder_that_a_row_begins_with_has_what_follows():
    """As in "`plan/`: `split.py`; `order.py`": up to the next folder, or the next column's mark."""
    for row in re.findall(r"^\|.*\|(.*)\|$", WHERE, re.MULTILINE):
        for folder, names in re.findall(
            r"`([\w/]+)/`(?:,[^:;/`]*)?: ((?:(?! / |`[\w/]+/`).)*)", row
        ):
            for name in re.findall(r"`(\w+\.py)", names):
                assert any(f.endswith(f"{folder}/{name}") for f in FILES), (folder, name, row)
