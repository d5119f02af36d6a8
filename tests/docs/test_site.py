"""The documentation builds as a static site without one warning, and stays within its budget."""

import subprocess
import sys

from tests.helpers import ROOT

BUDGET_WORDS = 25_000


def test_the_site_builds_without_warnings_and_has_every_page(tmp_path):
    built = subprocess.run(
        [
            sys.executable, "-m", "properdocs", "build", "--strict", "--quiet",
            "--config-file", str(ROOT / "properdocs.yml"), "--site-dir", str(tmp_path),
        ],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert all((tmp_path / page).with_suffix(".html").exists() for page in pages)
    folders = {page.parent.name for page in pages}
    assert folders == {"", "tutorial", "how-to", "reference", "explanation"}


def test_documentation_stays_within_its_budget():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= BUDGET_WORDS
