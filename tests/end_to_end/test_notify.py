"""Messages of real runs, to a command and to a web hook."""

import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from orchestrator.config.composer import compose
from orchestrator.errors import ConfigError
from orchestrator.runs.start import prepare
from tests.helpers import LIGHT, SMALL, call, until, verb

pytestmark = pytest.mark.whole_runs

TWO = (LIGHT, SMALL, "train.updates=2", "-q")


@pytest.fixture
def hook():
    """A web server on loopback, and the messages that it has got."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        # Not in this file: a run's environment.json has the checkout's uncommitted changes.
        yield f"http://127.0.0.1:{server.server_port}/{secrets.token_hex(8)}", got
        server.shutdown()
        thread.join()


def test_a_run_says_that_it_has_begun_and_ended(run, hook):
    address, got = hook
    call(*TWO, f"run.dir={run}", "notify.webhook=HOOK", HOOK=address, code=0)
    until(lambda: len(got) == 2, 20, "both messages")
    assert {one["event"] for one in got} == {"first_update", "end"}
    assert {one["text"] for one in got} == {
        "run: the first update is done",
        "run: finished after 2 updates",
    }
    written = [path for path in run.rglob("*") if path.is_file()]
    secret = address.rpartition("/")[2].encode()
    assert not [path for path in written if secret in path.read_bytes()]


def test_each_restart_and_the_failure_are_said_once(tmp_path):
    notes, run = tmp_path / "notes", tmp_path / "run"
    script = tmp_path / "note.sh"
    script.write_text(f'#!/bin/sh\necho "$ORCHESTRATOR_EVENT" >> "{notes}"\n')
    script.chmod(0o700)
    program = ("--", "false")
    flags = (SMALL, "run.max_restarts=1", f"notify.command={script}", f"run.dir={run}", "-q")
    verb("run", *flags, *program, code=1)
    until(lambda: notes.exists() and len(notes.read_text().split()) == 2, 20, "both messages")
    assert sorted(notes.read_text().split()) == ["failure", "requeue"]
    assert verb("resume", run, "-q").returncode == 1  # once more, with its own allowance
    until(lambda: len(notes.read_text().split()) >= 4, 20, "the messages of the resumed run")
    assert sorted(notes.read_text().split()) == ["failure", "failure", "requeue", "requeue"]


def test_what_cannot_be_sent_fails_nothing_and_is_a_warning(run):
    call(
        *TWO,
        f"run.dir={run}",
        "notify.webhook=HOOK",
        "notify.command='cat /nowhere'",
        HOOK="http://127.0.0.1:9/secret",
        code=0,
    )

    def warned():
        (status,) = json.loads(verb("status", run, "--json", code=0).stdout)
        return "\n".join(status["warnings"])

    until(lambda: warned().count("notify.webhook=HOOK failed") == 2, 20, "both failures")
    assert "notify.command failed, so a message (end) may be missing: Command" in warned()
    assert "/secret" not in warned()
    assert "/nowhere" in (run / "logs" / "notify.log").read_text(), "what the command says"


@pytest.mark.parametrize(
    ("recipient", "address", "message"),
    [
        ("command='nosuchprogram x'", "", "notify.command=nosuchprogram x: there is no such"),
        ("webhook=https://example.org/secret", "", "try notify.webhook=NOTIFY_URL"),
        ("webhook=HOOK", "", "export HOOK before the start"),
        ("webhook=HOOK", "file:///etc/passwd", "must hold an address"),
    ],
)
def test_a_recipient_that_cannot_be_reached_is_refused(monkeypatch, recipient, address, message):
    monkeypatch.setenv("HOOK", address)
    with pytest.raises(ConfigError, match=message):
        prepare(compose([f"notify.{recipient}"]))
