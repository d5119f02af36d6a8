"""Messages about a run to a command or a web hook: `notify.command` and `notify.webhook`.

What there is to say is read from the run's folder (`news`). The coordinator's agent looks once a
second, and the process that finalizes an attempt looks once more; a file for each message, which
exactly one of them creates, keeps messages from being sent twice. A process of its own sends each
(`main`): it outlives an agent, and neither delays nor fails a training. What it cannot send is in
notify.log.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping
from typing import IO, Any, cast

from orchestrator.config.schema import NotifyConfig
from orchestrator.errors import ConfigError, RunFolderError
from orchestrator.rundir.files import APPENDING, open_nofollow, read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import describe_culprit, read_outcome

log = logging.getLogger(__name__)

SEND_S = 20.0
"""For a command or a web hook; how long the end of a run waits for the last message."""


def check_recipients(notify: NotifyConfig) -> None:
    """Refuse a command that does not exist, and a web hook without its address."""
    if notify.command is not None:
        argv = shlex.split(notify.command)
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


def news(run: RunDir) -> Iterator[tuple[str, str, str]]:
    """Yield what can be said of a run: a name for each message, its event, and a sentence.

    Events: `first_update`; `requeue` (an attempt has ended, and another follows); `failure`, or
    `hang` where ranks waited for one in vain; `end` (finished, or stopped on request).
    """
    if run.metrics.exists() and run.metrics.stat().st_size:
        yield "first_update", "first_update", "the first update is done"
    result = run.read_result()
    for number in run.attempt_numbers():
        departure = read_json(run.departure(number))
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
            self._notify: dict[str, Any] = run.read_config().get("notify") or {}
        except RunFolderError:  # damaged: the process that trains or ends the run says so
            self._notify = {}

    def send(self, *, wait: bool = False) -> None:
        """Send each message that was not sent yet.

        Args:
            wait: for the messages to be sent, at most `SEND_S`: whoever ends now would take the
                processes that send them with it.
        """
        if not any(self._notify.values()):
            return
        try:
            new = [item for item in news(self._run) if _is_new(self._run, item[0])]
            sending = [self._start(event, sentence) for _, event, sentence in new]
        except (OSError, RunFolderError) as error:  # a full disk, say, which fails training itself
            log.warning("no message is sent: %s", error)
            return
        deadline = time.monotonic() + SEND_S
        for process in sending if wait else ():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return

    def _start(self, event: str, sentence: str) -> subprocess.Popen[str]:
        """Start the process that sends a message."""
        path = self._run.path
        message = {"event": event, "run": str(path), "text": f"{path.name}: {sentence}"}
        output = open_nofollow(self._run.logs / "notify.log", APPENDING)
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.notify", json.dumps(self._notify)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,  # no signal that ends the run ends it
        )
        os.close(output)
        with cast("IO[str]", process.stdin) as pipe:
            pipe.write(json.dumps(message))
        return process


def _is_new(run: RunDir, name: str) -> bool:
    """Return True to the first caller, of all processes, that asks about a message."""
    folder = run.path / "notified"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def main(notify: Mapping[str, Any], message: Mapping[str, str]) -> int:
    """Send one message; what fails is printed."""
    failed = 0
    if notify.get("command"):
        names = {f"ORCHESTRATOR_{name.upper()}": value for name, value in message.items()}
        try:
            subprocess.run(
                shlex.split(notify["command"]),
                input=json.dumps(message),
                text=True,
                env={**os.environ, **names},
                timeout=SEND_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            print(f"notify.command: {error}", file=sys.stderr)  # noqa: T201  # notify.log
            failed = 1
    if name := notify.get("webhook"):
        request = urllib.request.Request(  # noqa: S310  # `check_recipients` has seen its scheme
            os.environ.get(name, ""),
            json.dumps(message).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=SEND_S):  # noqa: S310
                pass
        except (OSError, ValueError) as error:
            print(f"notify.webhook={name}: {error}", file=sys.stderr)  # noqa: T201  # notify.log
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), json.loads(sys.stdin.read())))
