"""`orchestrator` without words: what is here, and what one can do with it now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.cli.options import print_json
from orchestrator.errors import ClusterError
from orchestrator.report.terminal import command, say
from orchestrator.rundir.status import RunStatus
from orchestrator.scheduler.client import NoClient, SlurmClient

PATIENCE_S = 3.0  # with a scheduler that does not answer


def overview(*, as_json: bool) -> None:
    """Print the runs and the cluster that are found from here, and the commands that fit them."""
    from orchestrator.runs.status import expand, statuses

    runs, _ = statuses(expand([]))
    cluster, can = seen(), list(_can(runs))
    if as_json:
        rows: list[dict[str, Any]] = [{"command": typed, "does": does} for typed, does in can]
        found = [one.to_json() for one in runs]
        print_json({"cluster": cluster, "runs": found, "commands": rows})
        return
    console = Console()
    states = Counter(one.state for one in runs)
    told = ", ".join(f"{count} {state}" for state, count in states.most_common())
    say(console, f"runs in runs/:  {told or 'none yet'}")
    say(
        console, f"cluster:        {cluster or 'no SLURM here: runs are local, on pretended nodes'}"
    )
    say(console, "")
    width = max(len(typed) for typed, _ in can)
    for typed, does in can:
        say(console, f"  {typed:<{width}}  {does}")


def seen() -> str | None:
    """The SLURM cluster that this machine belongs to, in words; None where there is none."""
    try:
        answer = SlurmClient().ask("sinfo", "-h", "-o", "%R", timeout_s=PATIENCE_S)
    except NoClient:
        return None
    except ClusterError as error:
        return f"SLURM does not answer: {error}"
    partitions = ", ".join(dict.fromkeys(answer.out.split()))
    return f"SLURM, with the partitions {partitions}" if partitions else None


def _can(runs: Sequence[RunStatus]) -> Iterator[tuple[str, str]]:
    yield "python -m orchestrator launch", "start a run; --help has its settings"
    yield "python -m orchestrator plan", "who would compute what, without starting"
    for states, verb, does in (
        (("failed", "stopped"), "resume", "go on with the newest that did not finish"),
        (("running", "starting"), "attach", "show the newest that runs"),
        (("finished",), "report", "a page of the newest that finished"),
    ):
        newest = next((one for one in reversed(runs) if one.state in states), None)
        if newest is not None:
            yield command(verb, _short(newest.folder)), does
    if runs:
        yield "python -m orchestrator status", "where all of them stand"
    yield "python -m orchestrator doctor", "what this machine or cluster offers, and what hurts"
    yield "python -m orchestrator --help", "all verbs"


def _short(folder: Path) -> Path:
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
