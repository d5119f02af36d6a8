"""One file without network, in which what others wrote stays text."""

import json
from html.parser import HTMLParser

import pytest

from orchestrator.page.data import data_of
from orchestrator.page.facts import facts_of
from orchestrator.page.html import html_of


class Reader(HTMLParser):
    """What a browser would see: tags with their attributes, and the text of each script."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self._script = [], [], False
        self.shown = []  # (tag, text) of what stands in an element
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
    return html_of(data_of(facts_of(sweep)))


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
    for text, data in (
        (page, data_of(facts_of(sweep))),
        (html_of(one := data_of(facts_of(made("one").path))), one),
    ):
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
    read = Reader(html_of(data_of(facts_of(made("evil", f"+job.note='{hostile}'").path))))
    assert len(read.scripts) == 4
    assert not any("alert(1)" in script for script in read.scripts[2:])


def test_a_page_for_a_browser_that_looks_again_says_so(made):
    data = data_of(facts_of(made("one").path))
    assert '<meta http-equiv="refresh" content="5">' in html_of(data, refresh_s=5)
    assert "refresh" not in html_of(data).split("<style>")[0]
