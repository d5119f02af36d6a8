"""The page: its markup, its formats, a browser."""

import csv
import html
import json
import os
import re
import shutil
import stat
import subprocess
from html.parser import HTMLParser

import pytest

from orchestrator import Sweep, open_run
from orchestrator.report_page.data import data_of
from orchestrator.report_page.page import csv_of, html_of, json_of, write_report
from orchestrator.rundir.files import write_json
from slurm.errors import DevClusterError
from slurm.install import ensure_installed
from tests.helpers import LIMIT_S, verb


class Reader(HTMLParser):
    """A page as a browser parses it: tags with their attributes, and the text of each script."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self._script = [], [], False
        self.shown = []  # (tag, text) of the content of an element
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._script = tag == "script"
        if self._script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._script = False

    def handle_data(self, data):
        if self._script:
            self.scripts[-1] += data
        elif data.strip():
            self.shown.append((self.tags[-1][0], data.strip()))


@pytest.fixture
def page(sweep):
    return html_of(data_of(sweep))


def test_it_is_small_and_asks_for_nothing(page):
    assert len(page.encode()) < 2_000_000
    read = Reader(page)
    for tag, attributes in read.tags:
        assert not {"src", "href"} & attributes.keys(), (tag, attributes)
    [policy] = [a["content"] for t, a in read.tags if "Content-Security-Policy" in a.values()]
    assert policy.startswith("default-src 'none'")


def leaves(value):
    """Every text and number of a table, as text."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves(one)
    else:
        yield str(value)


def test_every_figure_of_its_tables_and_tiles_is_in_its_data(page, sweep, made):
    for text, data in ((page, data_of(sweep)), (html_of(one := data_of(made("one").path)), one)):
        read = Reader(text)
        assert json.loads(read.scripts[0])["runs"] == data["runs"]
        known = {*leaves(data), "-"}
        shown = [figure for tag, figure in read.shown if tag in ("td", "b")]
        assert len(shown) > 15
        first = data["runs"][0]
        keys = {*first["plan"], *first["environment"], "in", "run_folder", "weights", "drawn"}
        heads = {key.replace("_", " ") for key in keys}
        assert not {f.removeprefix("sha256 ") for f in shown} - known - heads


def test_what_others_wrote_is_text(page, made):
    assert "&lt;b&gt;bold" in page
    assert "<b>bold" not in page
    hostile = "x</script><script>alert(1)</script>"
    read = Reader(html_of(data_of(made("evil", f"+job.note='{hostile}'").path)))
    assert len(read.scripts) == 4
    assert not any("alert(1)" in script for script in read.scripts[2:])


def test_a_program_that_reported_nothing_is_told_how(made):
    run = made("silent", records=[])
    write_json(run.plan, {"program": {"argv": ["train.py"]}})
    assert "current_run.report(update, loss=…)" in html_of(data_of(run.path))
    [line] = csv.DictReader(csv_of(data_of(run.path)).splitlines())
    assert (line["point"], line["loss"]) == ("silent", "0.05")


def test_csv_has_a_line_a_run_with_raw_figures(sweep):
    lines = list(csv.DictReader(csv_of(data_of(sweep)).splitlines()))
    assert [line["accumulation.steps"] for line in lines] == ["1", "2", "4"]
    assert [line["state"] for line in lines] == ["finished", "finished", "failed"]
    assert float(lines[0]["seconds_per_update"]) == 0.2
    assert lines[0]["loss"] == "0.05"


def test_csv_names_a_run_alone_as_it_names_it_among_others(made):
    run = made("0")
    [alone] = csv.DictReader(csv_of(data_of(run.path)).splitlines())
    assert alone["point"] == "0"


def test_json_is_the_pages_data(sweep):
    data = data_of(sweep)
    assert json.loads(json_of(data)) == data


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
        except DevClusterError as error:  # not root, or no Debian: no browser can run then
            pytest.skip(str(error))
    return found or "chromium"


@pytest.fixture(scope="module")
def seen(browser, sweep, tmp_path_factory):
    """A browser's view of a sweep's page and a run's, at both widths; of one of them, in the
    dark.
    """
    home = tmp_path_factory.mktemp("browser")
    pages = {"sweep": html_of(data_of(sweep)), "one": html_of(data_of(sweep / "0"))}
    frames = [
        f'<iframe id="{name}-{width}" width="{width}" srcdoc="{html.escape(page)}"></iframe>'
        for name, page in pages.items()
        for width in (390, 1400)
    ]
    found = {}
    for shade, looked_at in (("light", frames), ("dark", frames[:1])):
        text = f"<!doctype html><meta charset=utf-8>{LOOK}{''.join(looked_at)}"
        (home / "look.html").write_text(text)
        shown = subprocess.run(
            [
                browser,
                "--headless=new",
                "--disable-gpu",
                "--enable-logging=stderr",
                "--dump-dom",
                *["--no-sandbox"] * (os.geteuid() == 0),
                f"--user-data-dir={home / shade}",
                f"--blink-settings=preferredColorScheme={int(shade == 'light')}",
                "--virtual-time-budget=20000",
                (home / "look.html").as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        [facts] = re.findall(r'data-seen="([^"]*)"', shown.stdout)
        complaints = [line for line in shown.stderr.splitlines() if "CONSOLE" in line]
        found[shade] = json.loads(html.unescape(facts)), complaints
    return found


def _brightness(colour):
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


def test_nothing_is_cut_or_complained_of_and_dark_is_dark(seen):
    for shade, (pages, complaints) in seen.items():
        assert complaints == []
        assert len(pages) == (4 if shade == "light" else 1)
        for name, page in pages.items():
            assert page["wanted"] <= page["width"], (shade, name)
            assert page["out"] == [], (shade, name)
            assert page["charts"] >= 5
            dark = _brightness(page["paper"]) < _brightness(page["ink"])
            assert dark == (shade == "dark"), name


def test_a_page_is_written_beside_the_runs_for_their_owner_alone(sweep):
    page = sweep / "report.html"
    assert write_report(sweep, "html", None) == page
    assert page.read_text().startswith("<!doctype html>")
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert verb("report", sweep, "--format", "csv").stdout.startswith("point,folder,")


def test_a_page_is_written_by_its_run_as_an_object_without_a_line(made, sweep, capfd):
    run = open_run(made("one").path)
    assert run.report() == run.folder / "report.html"
    assert run.report().read_text().startswith("<!doctype html>")
    assert Sweep(sweep).report(sweep / "all.html").exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--format", "pdf"], "choose one of html, csv, json"),
        (["--format", "csv", "-o", "nowhere/table.csv"], "cannot be written: No such file"),
    ],
)
def test_misuse_is_one_sentence(sweep, more, said, tmp_path):
    done = verb("report", sweep, *more, cwd=tmp_path)
    assert done.returncode != 0
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
