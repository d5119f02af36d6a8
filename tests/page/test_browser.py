"""The page in a real browser, narrow and wide, light and dark: nothing is cut or complains."""

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from orchestrator.page.data import data_of
from orchestrator.page.facts import facts_of
from orchestrator.page.html import html_of
from orchestrator.rundir.files import write_json
from slurm.errors import DevClusterError
from slurm.install import ensure_installed
from tests.page.test_timeline import window

NAMES = ("chromium", "chromium-browser", "google-chrome")
LOOK = """
<body><script>
const seen = {};
const drawn = page =>
  [...page.querySelectorAll(".chart")].every(chart => chart.querySelector("svg"));
const look = () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, root = page.documentElement;
    if (!drawn(page)) { setTimeout(look, 50); return; }
    const out = [...page.querySelectorAll("body *")].filter(e => !e.closest(".wide, svg, details")
      && e.getBoundingClientRect().right > root.clientWidth + 1).map(e => e.outerHTML.slice(0, 80));
    const ink = frame.contentWindow.getComputedStyle(page.body);
    seen[frame.id] = { width: root.clientWidth, wanted: root.scrollWidth, out: out,
      charts: page.querySelectorAll(".chart").length, ink: ink.color, paper: ink.backgroundColor };
  }
  document.body.setAttribute("data-seen", JSON.stringify(seen));
};
window.onload = look;
</script>
"""


@pytest.fixture(scope="module")
def browser():
    """The machine's, or installed where that can be done, as SLURM is for its tests."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        try:
            ensure_installed({"chromium": ("chromium",)}, say=print)
        except DevClusterError as error:  # not root, or no Debian: nobody can look then
            pytest.skip(str(error))
    return found or "chromium"


@pytest.fixture(scope="module")
def seen(browser, sweep, tmp_path_factory):
    """What a browser makes of a sweep's page and a run's, at both widths, in both shades."""
    home = tmp_path_factory.mktemp("browser")
    write_json(sweep / "0" / "attempts" / "000" / "timeline.json",
               {"windows": [window([(1.0, 2.0, 0.1, 0.2), (2.5, 0.5, 0.1, 0.2)])]})  # fmt: skip
    pages = {
        "sweep": html_of(data_of(facts_of(sweep))),
        "one": html_of(data_of(facts_of(sweep / "0"))),
    }
    frames = "".join(
        f'<iframe id="{name}-{width}" width="{width}" srcdoc="{html.escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in (390, 1400)
    )
    (home / "look.html").write_text(f"<!doctype html><meta charset=utf-8>{LOOK}{frames}")
    found = {}
    for shade in ("light", "dark"):
        told = subprocess.run(
            [browser, "--headless=new", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
             *["--no-sandbox"] * (os.geteuid() == 0), f"--user-data-dir={home / shade}",
             f"--blink-settings=preferredColorScheme={int(shade == 'light')}",
             "--virtual-time-budget=20000", (home / "look.html").as_uri()],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        [facts] = re.findall(r'data-seen="([^"]*)"', told.stdout)
        complaints = [line for line in told.stderr.splitlines() if "CONSOLE" in line]
        found[shade] = json.loads(html.unescape(facts)), complaints
    return found


def _brightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_nothing_is_cut_or_complained_of_and_dark_is_dark(seen):
    for shade, (pages, complaints) in seen.items():
        assert complaints == []
        assert len(pages) == 4
        for name, page in pages.items():
            assert page["wanted"] <= page["width"], (shade, name)
            assert page["out"] == [], (shade, name)
            assert page["charts"] >= 6
            dark = _brightness(page["paper"]) < _brightness(page["ink"])
            assert dark == (shade == "dark"), name
