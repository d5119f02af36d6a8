"""What a replay found, on a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from orchestrator.replay.agreement import NAMES, Agreement, Figure
from orchestrator.replay.bisecting import Bisection
from orchestrator.replay.recorded import RecordedRun
from orchestrator.replay.replaying import Replayed
from orchestrator.replay.scratch import Line
from orchestrator.report.terminal import literal, new_table, print_facts, say
from orchestrator.units import first_few, plural

USUAL = ("weight", "applied", "gradient_digest")
"""Figures that are shown only where they differ."""
MOST_NUMBERS = 16
"""Samples of a micro-step that a table shows."""


def print_replay(report: Replayed, console: Console, most: int) -> None:
    """Print what a replay report. Args: most: rows of each table."""
    if report.agreement is None:
        sentence = f"update {report.update} is not recorded: the run failed in it"
        say(console, sentence, "yellow", prose=True)
    else:
        _print_agreement(report, report.agreement, console)
    for text in report.why:
        say(console, text, "yellow", prose=True)
    unit = "samples" if report.samples else "micro-steps"
    leaves = report.samples or report.leaves
    if leaves:
        title = f"{unit} of update {report.update}, the largest mean loss first"
        _print_leaves(leaves, title, console, most)
    else:
        say(console, "the loss is one of all samples (embed), so no micro-step has its own", "dim")
    if report.norms:
        table = new_table(("parameter", "gradient norm"), right=(1,))
        for name, norm in list(report.norms.items())[:most]:
            table.add_row(literal(name, console), f"{norm:.6g}")
        console.print(table)
        if len(report.norms) > most:
            say(console, f"and {plural(len(report.norms) - most, 'parameter')} more", "dim")


def _print_agreement(report: Replayed, agreed: Agreement, console: Console) -> None:
    style = "green" if agreed.holds else "bold red"
    number = report.update if agreed.differing is None or not agreed.exact else agreed.differing
    many = plural(agreed.updates, "update")
    if agreed.exact and agreed.differing is None:
        say(console, f"{many} recomputed: the same bits as recorded", style)
    elif agreed.exact:
        say(console, f"{many} recomputed: update {agreed.differing} is the first to differ", style)
    else:
        equal = "equal up to rounding" if agreed.holds else "NOT equal up to rounding"
        say(console, f"{many} recomputed, with reduction=fast: {equal}", style)
    shown = [f for f in agreed.figures if not (f.is_same and f.name in USUAL)]
    rows = [(NAMES.get(f.name, f.name), _figure_text(f, agreed), "") for f in shown]
    # Logs count from 1.
    print_facts([("update", f"{number} (in the log {number + 1})", ""), *rows], console)
    if agreed.weights is not None:
        bits = "the same bits as the run's" if agreed.exact else "none differs from the run's"
        unlike = f"largest relative difference {agreed.weights_difference:.3e}"
        text = unlike if agreed.weights_difference else bits
        good = not agreed.weights_difference or (agreed.holds and not agreed.exact)
        say(console, f"weights after {agreed.weights} updates: {text}", "green" if good else style)


def _figure_text(figure: Figure, agreed: Agreement) -> str:
    if figure.is_same:
        return f"{_number(figure.replayed)}, the same bits"
    text = f"{_number(figure.replayed)}, recorded {_number(figure.recorded)}"
    if figure.units is None:
        return text
    return f"{text}: {figure.units:,.1f} rounding units of {agreed.precision}"


def _number(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _print_leaves(leaves: Sequence[Line], title: str, console: Console, most: int) -> None:
    totals = [leaf["total"] for leaf in leaves if math.isfinite(leaf["total"])]
    whole = sum(totals)
    table = new_table(("mean loss", "share", "weight", "micro-step", "samples"), right=(0, 1, 2, 3))
    say(console, title, "bold")
    for leaf in leaves[:most]:
        mean = leaf["total"] / leaf["weight"] if leaf["weight"] else math.nan
        share = f"{leaf['total'] / whole:.1%}" if whole and math.isfinite(leaf["total"]) else ""
        numbers = first_few([*map(str, leaf["samples"])], MOST_NUMBERS)
        cells = (f"{mean:.6g}", share, f"{leaf['weight']:g}", str(leaf["leaf"]), numbers)
        table.add_row(*(literal(text, console) for text in cells))
    console.print(table)
    if len(leaves) > most:
        say(console, f"and {len(leaves) - most} more; --rows {len(leaves)} shows all", "dim")


def print_samples(recorded: RecordedRun, update: int, console: Console) -> None:
    """Print which samples an update had, micro-step by micro-step, by the plan alone."""
    pieces = recorded.pieces(update)
    many = sum(len(piece.samples) for piece in pieces)
    epoch = recorded.order.epoch_of(update)
    steps = plural(len(pieces), "micro-step")
    say(console, f"update {update}, epoch {epoch}: {plural(many, 'sample')} in {steps}", "bold")
    for piece in pieces:
        numbers = " ".join(map(str, piece.samples))
        say(console, f"micro-step {piece.number}: {numbers}")


def print_uses(
    recorded: RecordedRun, sample: int, uses: Sequence[tuple[int, int, int]], console: Console
) -> None:
    """Print in which updates a sample was used."""
    many = plural(len(uses), "time")
    total = recorded.last + 1
    say(console, f"sample {sample} was used {many} in {plural(total, 'update')}", "bold")
    for update, epoch, position in uses:
        say(console, f"update {update} (epoch {epoch}), position {position}")


def print_bisection(bisection: Bisection, a: Path, b: Path, console: Console) -> None:
    """Print where two runs part."""
    many = plural(bisection.updates, "update")
    compared = "gradient digests, losses" if bisection.by_digest else "losses, gradient norms"
    for text in bisection.notes:
        say(console, f"note: {text}", "yellow", prose=True)
    if bisection.update is None:
        say(console, f"{many} of both: {compared} have the same bits", "green")
    else:
        say(console, f"of {many}, update {bisection.update} is the first to differ", "bold red")
        rows = [
            (NAMES.get(name, name), f"{left} against {right}", "")
            for name, (left, right) in bisection.fields.items()
        ]
        print_facts(rows, console)
    if bisection.leaf is not None:
        leaf = bisection.leaf
        samples = first_few([*map(str, leaf.samples)], MOST_NUMBERS)
        say(console, f"first in micro-step {leaf.leaf}, samples {samples}", "bold")
        if _number(leaf.loss[0]) != _number(leaf.loss[1]):
            say(console, f"its loss is {leaf.loss[0]!r} against {leaf.loss[1]!r}")
        if leaf.parameters:
            named = first_few(list(leaf.parameters), MOST_NUMBERS)
            say(console, f"its gradient differs in {named}")
    elif bisection.repeats is not None:
        say(console, "replays of both compute the same micro-steps in it", "bold")
    for run, repeats in zip((a, b), bisection.repeats or (), strict=False):
        verdict = "repeats its record" if repeats else "does not repeat its record"
        meaning = "" if repeats else ": that run computed something else than its code does here"
        say(console, f"the replay of {run} {verdict}{meaning}", "" if repeats else "yellow")
    if bisection.unlike:
        say(console, "what else differs, or may:", "bold")
    for text in bisection.unlike:
        say(console, f"  {text}")
    if bisection.update is not None and not bisection.unlike:
        say(console, "settings, code, versions, processor and threads are the same")
