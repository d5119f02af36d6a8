"""The commands `replay` and `bisect`: what they run is imported when they run, since `--help` lists
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from orchestrator.commands.interface import Json, command, run_argument
from orchestrator.errors import EXIT_FAILED, UsageError
from orchestrator.report.terminal import command as command_line
from orchestrator.report.terminal import print_json, say

PLACES = ("cluster", "cluster.kind", "cluster.nodes", "cluster.ranks_per_node")


@command("replay RUN --update 48211")
def replay(
    run: Annotated[Path, run_argument("A run folder.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Where to compute, one process here by default: cluster.nodes=2, …"),
    ] = None,
    update: Annotated[
        int | None,
        typer.Option("--update", min=0, help="Counted from 0, as in metrics.jsonl and trackers."),
    ] = None,
    around_spike: Annotated[
        bool,
        typer.Option("--around-spike", help="The update whose loss jumps most; sample by sample."),
    ] = False,
    by_sample: Annotated[
        bool, typer.Option("--by-sample", help="Also the loss of each sample by itself.")
    ] = False,
    samples: Annotated[
        bool, typer.Option("--samples", help="Only list the update's samples; compute nothing.")
    ] = False,
    sample: Annotated[
        int | None, typer.Option("--sample", help="List the updates that used this sample.")
    ] = None,
    debug: Annotated[
        bool, typer.Option("--debug", help="Stop in the job's loss, in pdb, with its batch.")
    ] = False,
    leaf: Annotated[
        int | None,
        typer.Option("--leaf", min=0, help="Micro-step for --debug; by default the worst one."),
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="Do not go on to the next checkpoint.")
    ] = False,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of each table.")] = 10,
    as_json: Json = False,
) -> None:
    """Compute any recorded update of a run again, and say whether it agrees with the record.

    Exit code 1 where it does not agree.
    """
    from orchestrator.config.command_line import check_overrides, key_of
    from orchestrator.replay.debugging import debug as stop_in_pdb
    from orchestrator.replay.printing import print_replay, print_samples, print_uses
    from orchestrator.replay.recorded import RecordedRun
    from orchestrator.replay.replaying import replay_update
    from orchestrator.replay.scratch import Request, scratch

    words = overrides or []
    check_overrides(words, verb="replay")
    recorded, console = RecordedRun(run), Console()
    if sample is not None:
        _refuse(sample=(update, around_spike, samples, debug))
        uses = list(recorded.uses(sample))
        if as_json:
            names = ("update", "epoch", "position")
            print_json([dict(zip(names, use, strict=True)) for use in uses])
        else:
            print_uses(recorded, sample, uses, console)
        return
    if (update is None) == (not around_spike):
        raise UsageError(
            "replay needs one of --update N, --around-spike and --sample I, as in "
            f"{command_line('replay', run)} --update {recorded.last}"
        )
    if leaf is not None and not debug:
        raise UsageError(f"--leaf {leaf} is the micro-step for --debug, which is missing; add it")
    number = recorded.spike() if update is None else update
    if samples:
        recorded.require_update(number)
        if as_json:
            print_json([piece.to_json() for piece in recorded.pieces(number)])
        else:
            print_samples(recorded, number, console)
        return
    if debug and {key_of(word) for word in words} & {*PLACES}:
        raise UsageError(
            "--debug stops a process of this machine in pdb, so it takes no cluster; leave "
            f"{' '.join(words)} out"
        )
    notes = Console(stderr=True)
    with scratch(recorded, words, lambda text: say(notes, text, "dim", prose=True)) as place:
        report, before = replay_update(
            recorded,
            place,
            number,
            short=short or debug,
            by_sample=(by_sample or (around_spike and not recorded.is_program)) and not debug,
        )
        if as_json:
            print_json(report.to_json())
        else:
            print_replay(report, console, rows)
        if debug:
            step = _step_of(report.leaves, leaf)
            request = Request(update=number, last=number, debug_step=step)
            stop_in_pdb(place, request, before)
    if not report.agrees:
        raise typer.Exit(EXIT_FAILED)


@command("bisect RUN_A RUN_B")
def bisect(
    a: Annotated[Path, run_argument("A run folder.")],
    b: Annotated[Path, run_argument("Another run, which should be equal to it.")],
    records: Annotated[
        bool, typer.Option("--records", help="Only compare the records; compute nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the first update, micro-step and parameter in which two runs differ, and what else does.

    Exit code 1 where they differ.
    """
    from orchestrator.replay.bisecting import bisect_runs
    from orchestrator.replay.printing import print_bisection
    from orchestrator.replay.recorded import RecordedRun

    runs, notes = (RecordedRun(a), RecordedRun(b)), Console(stderr=True)
    for run in runs:
        _ = run.updates  # refuses one that has none, or a program without windows
    bisection = bisect_runs(
        *runs, lambda text: say(notes, text, "dim", prose=True), replays=not records
    )
    if as_json:
        print_json(bisection.to_json())
    else:
        print_bisection(bisection, runs[0].path, runs[1].path, Console())
    if bisection.update is not None:
        raise typer.Exit(EXIT_FAILED)


def _refuse(sample: tuple[Any, ...]) -> None:
    if any(value not in (None, False) for value in sample):
        raise UsageError(
            "--sample I lists the updates that used a sample, and takes no update; leave the other "
            "options out"
        )


def _step_of(leaves: list[dict[str, Any]], number: int | None) -> int:
    """Return the place of a micro-step among those of the one process; of the worst by default."""
    numbers = sorted(leaf["leaf"] for leaf in leaves)
    if not numbers:
        return 0
    if number is None:
        return numbers.index(leaves[0]["leaf"])
    if number not in numbers:
        nearest = min(numbers, key=lambda other: abs(other - number))
        raise UsageError(
            f"--leaf {number}: the update has micro-steps {numbers[0]} to {numbers[-1]}; the "
            f"nearest is --leaf {nearest}"
        )
    return numbers.index(number)
