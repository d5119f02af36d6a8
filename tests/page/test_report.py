"""`report RUN|SWEEP`, as it is typed."""

import stat
from http.client import HTTPConnection
from threading import Thread

import pytest

from orchestrator.page.serve import HOST, Server
from tests.helpers import verb


def test_a_page_is_written_beside_the_runs_for_their_owner_alone(sweep):
    done = verb("report", sweep)
    page = sweep / "report.html"
    assert (done.returncode, done.stdout) == (0, f"report: {page}\n")
    assert page.read_text().startswith("<!doctype html>")
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert verb("report", sweep, "--format", "csv").stdout.startswith("point,folder,")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--format", "pdf"], "choose one of html, md, csv, json, png"),
        (["-o", "nowhere/page.html"], "cannot be written: No such file or directory"),
        (["--serve", "--port", "1"], ""),
    ],
)  # fmt: skip
def test_misuse_is_one_sentence(sweep, more, said, tmp_path):
    if not said:
        with Server(lambda: "") as taken:
            more = ["--serve", "--port", str(taken.server_address[1])]
            done = verb("report", sweep, *more)
        said = "Address already in use"
    else:
        done = verb("report", sweep, *more, cwd=tmp_path)
    assert done.returncode != 0
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_only_who_knows_the_address_is_answered():
    with Server(lambda: "the page") as server:
        Thread(target=server.serve_forever, daemon=True).start()

        def asked(path, **headers):
            connection = HTTPConnection(HOST, server.server_address[1], timeout=60)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

        assert asked(f"/{server.token}/") == (200, b"the page")
        assert asked("/")[0] == 404
        assert asked(f"/{server.token}/", Host="elsewhere.example")[0] == 404
        server.shutdown()
