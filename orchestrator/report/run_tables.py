"""Tables of one run: its plan before, its figures and culprit after."""

from __future__ import annotations

import re
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel

from orchestrator.plan.plan_warnings import balance_text
from orchestrator.report.status_tables import STATE_STYLES
from orchestrator.report.terminal import command, literal, print_facts, say
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import Figures, History, Record, Summary, summarize
from orchestrator.rundir.outcome import (
    COMPUTED_WRONGLY,
    NODE_WENT_AWAY,
    describe_culprit,
    describe_end,
)
from orchestrator.units import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_learning_rate,
    format_number,
    format_percent,
    format_rate,
    format_seconds,
    named_numbers,
    plural,
)

# ruff: noqa: RUF001, RUF002 - the signs are meant, and have stand-ins where they cannot be shown.


Row = tuple[str, str, str]  # label, value and style
SHOWN_GROUPS = 12
SHOWN_RANGES = 4
SHOWN_SIZES = 4

TREE = "reproducible"
_NO_DATA = "the data set is not looked at here"
_NO_LENGTHS = "lengths are not looked at here; facts.lengths=FILE has them"
_NO_MODEL = "the model is not built here"


def print_plan(plan: Mapping[str, Any], console: Console) -> None:
    """Print a plan, given as `plan --json` has it."""
    _print_rows(_rows_of(plan), console)
    for warning in plan.get("warnings") or ():
        say(console, f"warning: {warning}", "yellow", prose=True)
    for note in plan.get("notes") or ():
        say(console, note, "dim", prose=True)


def print_plans(
    plans: Mapping[str, Mapping[str, Any]], console: Console, *, most_shown: int
) -> None:
    """Print the plans of a sweep's points: what they have in common once, and of each point only
    what differs.

    Args:
        plans: by the points' labels.
        most_shown: of more points only what they have in common is shown.
    """
    rows = {label: _rows_of(plan) for label, plan in plans.items()}
    lists = list(rows.values())
    common = [row for row in lists[0] if all(row in other for other in lists[1:])]
    _print_rows(common, console)
    for label, own in rows.items() if len(rows) <= most_shown else ():
        say(console, label, "bold")
        _print_rows([row for row in own if row not in common], console)
    for style, key, prefix in (("yellow", "warnings", "warning: "), ("dim", "notes", "")):
        sentences: dict[str, list[str]] = {}
        for label, plan in plans.items():
            for sentence in plan.get(key) or ():
                sentences.setdefault(sentence, []).append(label.partition(":")[0])
        for sentence, labels in sentences.items():
            whose = "" if len(labels) == len(plans) else f"{', '.join(labels)}: "
            say(console, f"{prefix}{whose}{sentence}", style, prose=True)


def _rows_of(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [*_plan_rows(plan), *_rank_rows(plan)]


def _print_rows(rows: Sequence[tuple[str, str]], console: Console) -> None:
    if rows:
        print_facts([(k, v, "dim" if v.startswith("unknown") else "") for k, v in rows], console)


def _plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    ranks = f"{plural(plan.get('ranks'), 'rank')} on {plural(plan.get('nodes'), 'node')}"
    if program := plan.get("program"):
        # Only for programs: most plans are of job classes.
        from orchestrator.config.launchers import program_style

        variables = f"{program_style(program['style']).title}'s variables"
        return [("where", ranks), ("program", " ".join(program["argv"])), ("ranks are", variables)]
    batch = f"{plural(plan.get('global_batch'), 'sample')} in {_micro_steps(plan)}"
    is_tree = plan.get("reduction") == TREE
    no_talk = "reproducible reductions depend on the leaves" if is_tree else _NO_MODEL
    size = plan.get("bytes_on_wire_per_update")
    wire = f"unknown ({no_talk})" if size is None else f"{format_bytes(size)} per update and rank"
    lengths = [("epoch", plan.get("epochs")), ("sample", plan.get("samples"))]
    known = ", ".join(plural(count, unit) for unit, count in lengths if count is not None)
    length = f" ({known})" if known else ""
    branch = plan.get("branch") or {}
    per_epoch = f"updates in epoch {branch.get('epoch', 0)}"
    if not (branch or plan.get("batch_schedule")):
        per_epoch = "updates per epoch"
    return [
        ("where", ranks),
        *_branch_rows(plan),
        ("global batch", batch),
        *_balance(plan),
        *stage_rows(plan),
        ("updates", f"{_known(plan, 'updates', _NO_DATA)}{length}"),
        (per_epoch, _known(plan, "updates_per_epoch", _NO_DATA)),
        ("samples in the data set", _known(plan, "dataset_samples", _NO_DATA)),
        ("parameters", _known(plan, "parameters", _NO_MODEL)),
        ("learning rate", _learning_rate(plan)),
        ("collectives per update", _known(plan, "collectives_per_update", no_talk)),
        ("bytes on the wire", wire),
    ]


def _branch_rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a row on where a branch of another run begins."""
    if branch := plan.get("branch"):
        place = f"epoch {branch['epoch']}"
        if branch["position"]:
            place += f", {format_count(branch['position'])} samples into it"
        yield "begins with", f"{branch['run']} after update {branch['updates']} ({place})"


def stage_rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a row for each later stage of a batch schedule, with the peak of its learning rate."""
    stages = plan.get("batch_schedule") or []
    scaling = (plan.get("schedule") or {}).get("scaling")
    for stage in stages[:SHOWN_GROUPS]:
        text = plural(stage["global_batch"], "sample")
        if stage["micro_steps"] is not None:
            text += f" in {plural(stage['micro_steps'], 'micro-step')}"
        if (rate := stage["learning_rate_peak"]) is not None:
            text += f", peak rate {format_learning_rate(rate)} (schedule.scaling={scaling})"
        yield f"from update {format_count(stage['update'])} on", text
    if hidden := len(stages[SHOWN_GROUPS:]):
        yield "", f"and {plural(hidden, 'more stage')} (see --json)"


def _micro_steps(plan: Mapping[str, Any]) -> str:
    if tokens := plan.get("micro_tokens"):
        most = f"at most {plural(tokens, 'padded token')}"
        return (
            f"micro-steps of {most}, up to {format_count(plan['micro_steps'])} a rank"
            if (plan.get("micro_steps"))
            else f"micro-steps of {most} (how many is unknown: {_NO_LENGTHS})"
        )
    text = plural(plan.get("micro_steps"), "micro-step")
    steps = plan.get("steps")
    if steps is not None and steps != plan.get("micro_steps"):
        text += f" ({format_count(steps)} asked for)"
    cap = plan.get("micro_batch")
    if cap is not None:
        text += f" of at most {plural(cap, 'sample')}"
    return text


def _balance(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the row about work by cost, if it is known."""
    if plan.get("padded_to_real") is None:
        return []
    return [("work by length", balance_text(plan))]


def _learning_rate(plan: Mapping[str, Any]) -> str:
    """Return the first, highest and last rate, or one number if it is constant."""
    own = plan.get("learning_rate_from")
    if own == "learning_rate":
        return "the job's own: learning_rate(update)"
    if plan.get("learning_rate_first") is None:
        return "that of the job's own optimizer"
    marks = [
        (name, plan.get(f"learning_rate_{name}"))
        for name in ("first", "peak", "last")
        if plan.get(f"learning_rate_{name}") is not None
    ]
    if len({rate for _, rate in marks}) == 1 and len(marks) == 3:
        text = f"{format_learning_rate(marks[0][1])}, constant"
    else:
        text = ", ".join(f"{name} {format_learning_rate(rate)}" for name, rate in marks)
        text += "" if len(marks) == 3 else f", last unknown ({_NO_DATA})"
    return f"{text} (of the job's own optimizer)" if own == "optimizer" else text


def _known(plan: Mapping[str, Any], key: str, why_not: str) -> str:
    value = plan.get(key)
    return f"unknown ({why_not})" if value is None else format_count(value)


def _rank_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return one row for the ranks that do the same, the busiest ranks as they come."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, sizes in enumerate(plan.get("micro_batches") or []):
        groups.setdefault(tuple(sizes), []).append(rank)
    rows = [
        (named_numbers("rank", ranks, SHOWN_RANGES), _work(sizes))
        for sizes, ranks in groups.items()
    ]
    hidden = len(rows) - SHOWN_GROUPS
    if hidden > 0:
        rows = [*rows[:SHOWN_GROUPS], ("", f"and {plural(hidden, 'more group')} (see --json)")]
    return rows


def _work(sizes: Sequence[int]) -> str:
    """Return a rank's samples of one update and their micro-batches.

    >>> _work([7, 6]), _work([8] * 64), _work([4] * 9 + [3]), _work([])
    ('13 samples = 7+6', '512 samples = 64×8', '39 samples = 9×4 + 1×3', 'idle')
    """
    if not sizes:
        return "idle"
    total = plural(sum(sizes), "sample")
    if len(sizes) == 1:
        return total
    if len(sizes) <= SHOWN_SIZES:
        return f"{total} = {'+'.join(map(str, sizes))}"
    runs = [(size, len(list(same))) for size, same in groupby(sizes)]
    shown = " + ".join(f"{count}×{size}" for size, count in runs[:SHOWN_SIZES])
    return f"{total} = {shown}{' + …' if len(runs) > SHOWN_SIZES else ''}"


class _Compilation:
    """How long updates compiled, and what a micro-step takes since."""

    def __init__(self) -> None:
        self._updates, self._seconds = 0, 0.0
        self._steady_s = array("d")
        self._plain_s: float | None = None

    def add(self, record: Record) -> None:
        if record.get("compile_s"):
            self._updates += 1
            self._seconds += record["compile_s"]
        elif record.get("compute_s") and record.get("micro_steps"):
            self._steady_s.append(record["compute_s"] / record["micro_steps"])
        self._plain_s = record.get("plain_step_s") or self._plain_s

    def rows(self) -> list[Row]:
        """Return the rows about compilation; none if nothing was compiled."""
        if not self._updates:
            return []
        text = f"{format_seconds(self._seconds)}, in {plural(self._updates, 'update')}"
        rows = [("compilation", text, "")]
        if self._steady_s:
            step_s = statistics.median(self._steady_s)
            text = f"{format_seconds(step_s)} compiled"
            if self._plain_s:
                ratio = self._plain_s / step_s
                times = f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
                text += f", {format_seconds(self._plain_s)} without: {times} times as fast"
            rows.append(("  a micro-step", text, ""))
        return rows


LOG_LINES = 20
RESTARTS_SHOWN = 5
# Causes that a node's hardware may have; a Python exception of the job is none.
NODE_FAULT = re.compile(
    r"SIG(KILL|BUS|SEGV|ABRT)|NCCL|HCCL|CUDA error|Ascend|ECC"
    rf"|{re.escape(NODE_WENT_AWAY)}|{re.escape(COMPUTED_WRONGLY)}"
)


def print_closing(
    result: Mapping[str, Any],
    history: History,
    folder: Path,
    console: Console,
    *,
    plan: Mapping[str, Any] | None = None,
) -> None:
    """Print the end of a run from its `result.json`, its `metrics.jsonl` and, if read, its plan."""
    plan = plan or {}
    figures, parts = Figures(), _Parts(result, plan)
    for record in history.updates:  # once: they may be millions
        figures.add(record)
        parts.add(record)
    summary = summarize(result, figures)
    own = plan.get("program")
    rows = (
        _rows_of_program(result, summary, parts, own)
        if own
        else _rows(result, summary, parts, plan)
    )
    print_facts(rows, console)
    # Not in the table, so that it stays in one piece however long it is.
    say(console, f"run folder: {folder}")
    if summary.state == "failed":
        _print_culprit(result.get("culprit"), folder, console)
    elif summary.state == "stopped":
        if result.get("culprit"):
            say(console, describe_end(result), "bold yellow")
        elif result.get("why"):
            say(console, f"it was stopped: {result['why']}", "bold yellow")
        say(console, f"to go on from here: {command('resume', folder)}", "bold")
    elif summary.state == "finished" and not own:
        if early := result.get("ended_early"):
            say(console, f"it ended early: {early}", "bold")
        say(console, f"to compare with another run: {command('compare', folder)} OTHER")


class _Parts:
    """The parts of a run's table that are about its updates."""

    def __init__(self, result: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        planned = result.get("planned_collectives_per_update")
        if planned is None:
            planned = plan.get("collectives_per_update")
        self.skipped, self.compilation = _Skipped(), _Compilation()
        self.metrics: Mapping[str, Any] = {}  # of the last update
        self.collectives = _Collectives(planned, plan)

    def add(self, record: Record) -> None:
        self.metrics = record.get("metrics") or {}
        self.skipped.add(record)
        self.compilation.add(record)
        self.collectives.add(record)


def _rows(
    result: Mapping[str, Any],
    summary: Summary,
    parts: _Parts,
    plan: Mapping[str, Any],
) -> list[Row]:
    """Return label, value and style of each row; unknown values are mostly left out."""
    planned_updates = plan.get("updates")
    of = "" if planned_updates is None else f" of {format_count(planned_updates)}"
    rows = [
        ("state", summary.state, STATE_STYLES.get(summary.state, "")),
        ("updates", f"{format_count(summary.updates)}{of}", ""),
        *parts.skipped.rows(),
        ("samples", format_count(summary.samples), ""),
        ("final loss", format_number(result.get("loss")), ""),
        *((f"final {name}", format_number(value), "") for name, value in parts.metrics.items()),
    ]
    for name, value in summary.metrics.items():
        rows.append((f"held-out {name}", format_number(value), "bold"))
    if best := result.get("best"):
        after = f" after update {format_count(best['updates'])}"
        rows.append((f"best {best['figure']}", f"{format_number(best['value'])}{after}", "bold"))
    rows += _restarts(result.get("restarts") or [])
    rows += _survived(result)
    rows += [
        ("time", format_seconds(summary.seconds), ""),
        ("speed of updates", format_rate(summary.samples_per_second), ""),
        *((label, text, "") for label, text in _balance(plan)),
    ]
    if summary.time_shares:
        shares = (f"{name} {format_percent(share)}" for name, share in summary.time_shares.items())
        rows.append(("time of updates", ", ".join(shares), ""))
    rows += parts.compilation.rows()
    rows += [
        ("collectives per update", *parts.collectives.row(summary)),
        ("bytes on the wire", f"{format_bytes(summary.bytes_on_wire_per_update)} per update", ""),
        ("peak memory", f"{format_bytes(summary.peak_memory_bytes)} (largest rank)", ""),
    ]
    for name, size in summary.memory_bytes.items():
        rows.append((f"  of which {name}", format_bytes(size), ""))
    if result.get("weights_sha256"):
        rows.append(("weights", f"sha256 {result['weights_sha256'][:16]}", ""))
    return [row for row in rows if not row[1].startswith(UNKNOWN)]


def _rows_of_program(
    result: Mapping[str, Any], summary: Summary, parts: _Parts, program: Mapping[str, Any]
) -> list[Row]:
    """Return what is known of a program: how it ended, and what it reported itself."""
    rows = [
        ("state", summary.state, STATE_STYLES.get(summary.state, "")),
        ("program", " ".join(map(str, program["argv"])), ""),
    ]
    if summary.updates:
        rows.append(("updates", format_count(summary.updates), ""))
        rows.append(("last loss", format_number(result.get("loss")), ""))
        rows += [(f"last {name}", format_number(n), "") for name, n in parts.metrics.items()]
    rows += _restarts(result.get("restarts") or [], program=True)
    if summary.seconds:
        rows.append(("time", format_seconds(summary.seconds), ""))
    if summary.samples_per_second:
        rows.append(("speed of updates", format_rate(summary.samples_per_second), ""))
    return rows


class _Skipped:
    """Updates that changed no weight: because of an overflow, by `train.on_non_finite=skip`, or
    because nothing in them counted.
    """

    def __init__(self) -> None:
        self._skipped, self._without_weight = 0, 0
        self._scales: tuple[float, float] | None = None  # the first and the last

    def add(self, record: Record) -> None:
        if record.get("applied") is False:
            self._skipped += 1
            self._without_weight += record.get("weight") == 0
        scale = record.get("loss_scale", 1.0)
        if scale != 1.0:
            self._scales = (self._scales[0] if self._scales else scale, scale)

    def rows(self) -> list[Row]:
        if not self._skipped:
            return []
        counts = {
            "not finite": self._skipped - self._without_weight,
            "without weight": self._without_weight,
        }
        why = ", ".join(
            (f"{count} " if self._skipped != count else "") + what
            for what, count in counts.items()
            if count
        )
        scale = "; loss scale {:g} to {:g}".format(*self._scales) if self._scales else ""
        return [("  not applied", f"{plural(self._skipped, 'update')}, {why}{scale}", "yellow")]


def _survived(result: Mapping[str, Any]) -> list[Row]:
    """Return which ranks were lost while the others continued, each time redoing the current
    update, and which rejoined.
    """
    notes, joined = result.get("survived") or [], result.get("joined") or []
    if not notes:
        return []
    gone = [rank for note in notes for rank in note["gone"]]
    came = [rank for note in joined for rank in note["came"]]
    lost = f"{_in_order(gone)} lost"
    again = f"; {_in_order(came)} rejoined" if came else ""
    at_the_end = len(result.get("peak_memory_bytes") or ()) or notes[-1]["ranks"]
    survivors = f"{plural(at_the_end, 'rank')} went on"
    redone = sum(note.get("redone", 1) + note.get("lost_updates", 0) for note in notes)
    text = f"{lost}; {plural(redone, 'update')} redone{again}; {survivors}"
    why = [f"{_in_order(note['gone'])} {', '.join(note['why'])}" for note in notes if note["why"]]
    return [
        ("survived", text, "yellow"),
        *(("  lost", reason, "") for reason in why[-RESTARTS_SHOWN:]),
    ]


def _in_order(ranks: Sequence[int]) -> str:
    """Name ranks as they were lost, or rejoined."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _restarts(notes: Sequence[Mapping[str, Any]], *, program: bool = False) -> list[Row]:
    """Return the restarts, the updates done twice for them, and their causes, the latest last."""
    if not notes:
        return []
    lost = sum(note["lost_updates"] for note in notes)
    again = f"; {plural(lost, 'update')} done again" if lost else ""
    resumed = sum(bool(note.get("asked")) for note in notes)
    rows: list[Row] = []
    if restarts := len(notes) - resumed:
        rows.append(("restarts", f"{format_count(restarts)}{again}", "yellow"))
    if resumed:  # by a person, which says nothing against the run
        rows.append(("resumed", plural(resumed, "time") + ("" if restarts else again), ""))
    for note in notes[-RESTARTS_SHOWN:]:
        after = f"after update {format_count(note['resumed_from'])}"
        where = after if note["resumed_from"] else "" if program else "from the beginning"
        why = f"{where}: {note['why']}" if where else str(note["why"])
        rows.append((f"  attempt {note['attempt']}", why, ""))
    return rows


class _Collectives:
    """Measured collectives against planned ones. A run that talked more must not look well.

    Ranks may leave and come back: the first record of each group says what is planned for it. An
    update that was skipped has no new weights to gather.
    """

    def __init__(self, planned: int | None, plan: Mapping[str, Any]) -> None:
        self._planned, self._plan = planned, plan
        self._of_group = planned
        self._measured, self._wrong, self._first_wrong = 0, 0, 0
        self._low, self._high = 0, 0
        # Exchanges in which ranks agree on the used parameters are needed in some windows only.
        self._exchanges = 0

    def add(self, record: Record) -> None:
        if record.get("collectives") is None:
            return
        exchanges = record.get("exchanges", 0)
        count = record["collectives"] - exchanges
        self._exchanges += exchanges
        self._low = min(self._low, count) if self._measured else count
        self._high = max(self._high, count) if self._measured else count
        self._measured += 1
        if self._planned is None:
            return
        of_this_group = record.get("planned_collectives")
        self._of_group = self._of_group if of_this_group is None else of_this_group
        gathers = self._plan.get("gathers_per_update", 0) * (record.get("applied") is False)
        if self._of_group is not None and count != self._of_group - gathers:
            self._first_wrong = self._first_wrong if self._wrong else record["update"]
            self._wrong += 1

    def row(self, summary: Summary) -> tuple[str, str]:
        """Return the text and its style."""
        if not self._measured:
            return format_count(summary.collectives_per_update), ""
        exchanges = plural(self._exchanges, "exchange")
        extra = f", and {exchanges} of used parameters" if self._exchanges else ""
        low, high = self._low, self._high
        text = format_count(low) if low == high else f"{format_count(low)} to {format_count(high)}"
        if self._planned is None:
            why = (
                ": they depend on each rank's leaves" if self._plan.get("reduction") == TREE else ""
            )
            return f"{text} (planned: unknown{why}){extra}", ""
        if not self._wrong:
            return f"{text}, as planned{extra}", "green"
        of = plural(self._measured, "update")
        where = f"{self._wrong} of {of}, first in update {self._first_wrong + 1}"
        planned = format_count(self._planned)
        return f"MISMATCH: {text} measured, {planned} planned ({where})", "bold red"


def _print_culprit(culprit: Mapping[str, Any] | None, folder: Path, console: Console) -> None:
    if culprit is None:
        say(console, "which rank failed first is unknown; the logs are in the run folder", "red")
    else:
        say(console, describe_culprit(culprit), "bold red")
        lines, rank = (culprit.get("log_tail") or ())[-LOG_LINES:], culprit.get("rank")
        whose = culprit.get("node") or "the log" if rank is None else f"rank {rank}"
        if lines:
            console.print(
                Panel(
                    literal("\n".join(lines), console),
                    title=literal(f"last lines of {whose}", console),
                    title_align="left",
                    border_style="red",
                    box=box.HORIZONTALS,
                    padding=0,
                )
            )
        if culprit.get("remark"):
            say(console, str(culprit["remark"]), "red")
    say(console, f"to try again: {command('resume', folder)}", "bold")
    if culprit is not None and (node := suspect_node(culprit, folder)):
        without = f"{command('resume', folder)} cluster.exclude={node}"
        say(console, f"to try again without {node}, if that node is to blame: {without}")


def suspect_node(culprit: Mapping[str, Any], folder: Path) -> str | None:
    """Return the node to exclude from the next submission, if its hardware may have failed."""
    node, cause = culprit.get("node"), culprit.get("cause") or ""
    if not node or node in ("batch", "scheduler") or not NODE_FAULT.search(cause):
        return None
    return node if RunDir(folder).read_handle() is not None else None
