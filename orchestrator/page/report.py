"""`report RUN|SWEEP`: write what was run as a page or a file, or keep a page fresh."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from orchestrator.errors import RunFolderError, UsageError
from orchestrator.page.data import data_of
from orchestrator.page.facts import facts_of
from orchestrator.page.formats import FORMATS
from orchestrator.page.html import html_of
from orchestrator.page.serve import FRESH_S, Server
from orchestrator.report.terminal import say
from orchestrator.rundir.files import write_atomically

TO_A_FILE = ("html", "png")  # the others go to standard output unless a file is named


def write_report(path: Path, form: str, output: Path | None, console: Console) -> None:
    """Write the report of a run or a sweep: whole or not at all, and for its owner alone.

    Raises:
        UsageError: no such format, or it needs a package that is not installed.
        RunFolderError: there is no run, or the file cannot be written.
    """
    if form not in FORMATS:
        raise UsageError(f"--format={form}: choose one of {', '.join(FORMATS)}")
    made = FORMATS[form](data_of(facts_of(path)))
    if output is None and form not in TO_A_FILE:
        sys.stdout.write(str(made))
        return
    target = output or path / f"report.{form}"
    try:
        write_atomically(target, made)
    except OSError as error:
        hint = "" if output else "; name another file with --output"
        raise RunFolderError(f"{target} cannot be written: {error.strerror}{hint}") from error
    say(console, f"report: {target}")


def serve_report(path: Path, port: int, console: Console) -> None:
    """Answer on loopback until Ctrl-C. Raises as `write_report` does, before it listens."""

    def make() -> str:
        return html_of(data_of(facts_of(path)), refresh_s=round(FRESH_S))

    make()
    try:
        server = Server(make, port)
    except OSError as error:
        raise UsageError(f"--port={port} cannot be used: {error.strerror}") from error
    say(console, f"{server.url} (for you alone; Ctrl-C ends it)")
    with server:
        server.serve_forever()
