"""The command `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from orchestrator.commands.interface import Quiet, command, run_argument
from orchestrator.report.terminal import say


@command("report RUN --format csv")
def report(
    runs: Annotated[list[Path], run_argument("Run folders, or sweeps': on one page.")],
    form: Annotated[str, typer.Option("--format", help="html (a page), csv or json.")] = "html",
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="A file; a page's is RUN/report.html, or report.html."),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write a page about a run or a sweep: curves, time, memory, what differs, how to repeat it."""
    from orchestrator.report_page.page import write_report

    first, *others = (run.absolute() for run in runs)
    page = write_report(first, form, output, others)
    if page is not None and not quiet:
        say(Console(), f"report: {page}")
