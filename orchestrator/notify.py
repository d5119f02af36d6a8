"""Messages about a run to a command or a web hook: `notify.command` and `notify.webhook`.

Messages follow from the run's folder (`messages`). A local launcher reads it several times a
second, elsewhere the coordinator's agent once a second, and the process that finalizes an attempt
once more. A process of its own sends each message to each recipient (`main`), which neither delays
nor fails a training. Exactly one process creates a message's marker in `notified`, so none is sent
twice. The marker is removed if the message certainly was not sent: the next process that reads the
folder sends it. A failure is a warning of the run; what a command prints is in logs/notify.log.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from subprocess import CalledProcessError
from typing import IO, Any, cast
from urllib.error import URLError

from orchestrator.config.schema import NotifyConfig
from orchestrator.errors import ConfigError, RunFolderError
from orchestrator.rundir.files import APPENDING, open_nofollow, read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import describe_culprit, read_outcome
from orchestrator.rundir.restarts import read_departure
from orchestrator.rundir.warnings import warn_of

log = logging.getLogger(__name__)

SEND_S = 20.0
"""For a command or a web hook."""
WAIT_S = SEND_S + 5.0
"""How long the end of an agent or of a batch script waits for the last message."""
UNSENT = (FileNotFoundError, PermissionError, CalledProcessError, URLError, ValueError)
"""A command that is not started or fails, an address that is not reached or refuses. After other
errors, a lost connection or a timeout, the message may have been sent."""


def check_recipients(notify: NotifyConfig) -> None:
    """Refuse a command that does not exist, and a web hook without its address.

    Raises:
        ConfigError: the message is for the user.
    """
    if notify.command is not None:
        try:
            argv = shlex.split(notify.command)
        except ValueError as error:
            raise ConfigError(
                f"notify.command={notify.command}: a quote in it is not closed, or its last "
                f"backslash escapes nothing ({error})"
            ) from None
        if not argv or shutil.which(argv[0]) is None:
            raise ConfigError(
                f"notify.command={notify.command}: there is no such program; it is run without a "
                f"shell, so name a program and its arguments"
            )
    name = notify.webhook
    if name is None:
        return
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ConfigError(
            "notify.webhook must be the name of an environment variable that holds the address, "
            "which is a secret and must not be in a run's folder; try notify.webhook=NOTIFY_URL"
        )
    if not os.environ.get(name, "").startswith(("https://", "http://")):
        raise ConfigError(
            f"notify.webhook={name} names an environment variable that must hold an address "
            f"(https://…); export {name} before the start"
        )


def messages(run: RunDir) -> Iterator[tuple[str, str, str]]:
    """Yield what can be said of a run: a name for each message, its event, and a sentence.

    Events: `first_update`; `stall` (for minutes no rank, or not one of them, has made progress; the
    run continues); `sentinel` (a rank computed something wrongly); `requeue` (an attempt has ended,
    and another follows); `failure`, or `hang` where ranks waited for one in vain; `end` (finished,
    or stopped on request).
    """
    if run.metrics.exists() and run.metrics.stat().st_size:
        yield "first_update", "first_update", "the first update is done"
    result = run.read_result()
    if result is None and (stall := read_json(run.stall(run.latest_attempt))):
        yield f"stall-{run.latest_attempt}-{stall['time']:.0f}", "stall", stall["text"]
    for number in run.attempt_numbers():
        if wrong := read_json(run.wrong_result(number)):
            ranks = "-".join(map(str, wrong["ranks"]))
            yield f"sentinel-{number}-{ranks}", "sentinel", wrong["text"]
        departure = read_departure(run, number)
        if departure and result is None:
            again = f"attempt {number} has ended, and another follows: {departure['why']}"
            yield f"requeue-{number}", "requeue", again
    if result is None:
        return
    attempt = max(run.attempt_numbers(), default=0)
    name = f"end-{attempt}"
    if result["state"] == "failed":
        outcome = read_outcome(run, attempt)
        hangs = outcome is not None and outcome.culprit is not None and outcome.culprit.hangs
        yield name, "hang" if hangs else "failure", describe_culprit(result["culprit"] or {})
    else:
        yield name, "end", f"{result['state']} after {result['updates']} updates"


class Notifier:
    """Sends what is new of a run, if the run is configured to. Raises nothing."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        try:
            notify: dict[str, Any] = run.read_config().get("notify") or {}
        except RunFolderError:  # damaged: the process that trains or ends the run says so
            notify = {}
        # Each key of the section is a recipient; a setting that is none must not be added there.
        self._recipients = {kind: str(named) for kind, named in notify.items() if named}
        self._tried: set[Path] = set()
        self._senders: list[subprocess.Popen[str]] = []

    @property
    def senders(self) -> Collection[int]:
        """Return the processes that send now; each leads the session of those that it starts."""
        return [process.pid for process in self._senders if process.poll() is None]

    def send(self) -> None:
        """Begin to send each message that no process has claimed; this one tries none again. A
        message is not sent twice, perhaps never, if the sender is killed.
        """
        self._senders = [process for process in self._senders if process.poll() is None]
        try:
            for name, event, sentence in messages(self._run) if self._recipients else ():
                for kind in self._recipients:
                    marker = self._run.path / "notified" / f"{name}.{kind}"
                    if marker not in self._tried and _claim(marker):
                        self._tried.add(marker)
                        self._start(kind, marker, event, sentence)
        except (OSError, RunFolderError) as error:  # a full disk, say, which fails training itself
            log.warning("no message is sent: %s", error)

    def wait(self) -> None:
        """Wait for messages that are being sent, at most `WAIT_S`: the end of the caller's job
        ends the processes that send them.
        """
        deadline = time.monotonic() + WAIT_S
        for process in self._senders:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def _start(self, kind: str, marker: Path, event: str, sentence: str) -> None:
        """Start the process that sends a message to a recipient."""
        path, recipient = self._run.path, self._recipients[kind]
        message = {"event": event, "run": str(path), "text": f"{path.name}: {sentence}"}
        try:
            with os.fdopen(open_nofollow(self._run.logs / "notify.log", APPENDING)) as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "orchestrator.notify", kind, recipient, str(marker)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    text=True,
                    start_new_session=True,  # no signal that ends the run ends it
                )
            self._senders.append(process)
            with cast("IO[str]", process.stdin) as pipe:
                pipe.write(json.dumps(message))
        except OSError:
            marker.unlink(missing_ok=True)
            raise


def _claim(marker: Path) -> bool:
    """Return True to the first caller, of all processes, that asks about a message."""
    marker.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        marker.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        return False
    return True


def main(kind: str, recipient: str, marker: Path, message: Mapping[str, str]) -> int:
    """Send one message to one recipient; warn of a failure, and remove `marker` if `UNSENT`."""
    key = f"notify.{kind}" if kind == "command" else f"notify.{kind}={recipient}"
    try:
        if kind == "command":
            names = {f"ORCHESTRATOR_{name.upper()}": value for name, value in message.items()}
            subprocess.run(
                shlex.split(recipient),
                input=json.dumps(message),
                text=True,
                env={**os.environ, **names},
                timeout=SEND_S,
                check=True,
            )
        else:
            request = urllib.request.Request(  # noqa: S310  # `check_recipients` checks its scheme
                os.environ.get(recipient, ""),
                json.dumps(message).encode(),
                {"Content-Type": "application/json"},
            )
            urllib.request.urlopen(request, timeout=SEND_S).close()  # noqa: S310
    except (OSError, ValueError, subprocess.SubprocessError, http.client.HTTPException) as error:
        run = RunDir(Path(message["run"]))
        sentence = f"{key} failed, so a message ({message['event']}) may be missing: {error}"
        warn_of(run.warnings(run.latest_attempt, 0), 0, sentence)
        if isinstance(error, UNSENT):
            marker.unlink(missing_ok=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.stdin.read())))
