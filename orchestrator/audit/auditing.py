"""Audits: run a training script briefly, observed, and judge its updates.

The script runs unchanged, on simulated nodes, in a scratch folder that looks like the current one:
each entry is a link, replaced by a copy before it is written (`audit/scratch.py`); what the script
writes is deleted with the folder.
"""

from __future__ import annotations

import io
import os
import shlex
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from rich.console import Console

from orchestrator.agent.root_cause import tail
from orchestrator.audit import FAKE_CUDA, FILES, FOLDER, UPDATES
from orchestrator.audit.faults import FAULTS
from orchestrator.audit.judge import (
    ESSENTIAL,
    RIGHT,
    ROWS,
    SLOW,
    UNJUDGED,
    WRONG,
    Judgement,
    Trace,
    judge,
    read_trace,
)
from orchestrator.audit.scratch import link_entries
from orchestrator.config.command_line import (
    LENGTHS,
    key_of,
    program_overrides,
    quote_for_hydra,
    without_python,
)
from orchestrator.config.composer import compose
from orchestrator.config.job_source import check_target
from orchestrator.config.program import RANK_STARTERS
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_UNJUDGED,
    ConfigError,
)
from orchestrator.plugins import OBSERVER
from orchestrator.report.terminal import literal, new_table, say
from orchestrator.rundir.outcome import describe_culprit
from orchestrator.runs.follow import OutputOptions, start_run
from orchestrator.runs.start import prepare, prepared_run
from orchestrator.units import plural, spans

PROGRAM = "orchestrator.audit"
STEPS = (1, 3)  # in the place of {steps}: three is likely to leave a ragged last window
JOB_UPDATES = 8
DEFAULTS = ("cluster.nodes=1", "cluster.ranks_per_node=2")
OURS = ("run.snapshot=false", "run.watch=true", "tracker=none", "run.max_restarts=0")
SIGNS = {WRONG: "WRONG", UNJUDGED: "?", SLOW: "slow", RIGHT: "ok"}
STYLES = {WRONG: "bold red", UNJUDGED: "yellow", SLOW: "yellow", RIGHT: "green"}


@dataclass
class Audit:
    """One audited run.

    Attributes:
        steps: the number that --steps was filled with.
        reason: why nothing could be judged.
        notes: further sentences.
        log: the end of the log of a rank that failed.
    """

    ranks: int
    steps: int | None = None
    judgement: Judgement | None = None
    reason: str | None = None
    notes: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        if self.judgement is None:
            return UNJUDGED
        if any(f.state == WRONG for f in self.judgement.findings):
            return WRONG
        states = {self.judgement.state(row) for row in ESSENTIAL}
        if UNJUDGED in states:
            return UNJUDGED
        return SLOW if any(f.state == SLOW for f in self.judgement.findings) else RIGHT

    def to_json(self) -> dict[str, Any]:
        judgement = self.judgement
        return {
            "ranks": self.ranks,
            "steps": self.steps,
            "state": self.state,
            "reason": self.reason,
            "notes": self.notes,
            "faults": judgement.faults if judgement else [],
            "rows": {row: judgement.state(row) for row in ROWS} if judgement else {},
            "findings": [asdict(f) for f in judgement.findings] if judgement else [],
            "updates": judgement.updates if judgement else [],
        }


def audit(
    overrides: Sequence[str],
    program: Sequence[str],
    *,
    steps: str | None,
    updates: int | None,
    fake_cuda: bool,
    output: OutputOptions,
    strict: bool = False,
) -> tuple[list[Audit], int]:
    """Audit a script, or a job class where `program` is empty; return the exit code, too.

    Args:
        steps: an argument with `{steps}`, for one run with each number of `STEPS`.
        updates: of each run; None: 8, or up to the end of the first epoch.
        strict: a slow run fails, too.

    Raises:
        UsageError: the run cannot be started, or not audited.
    """
    if updates is not None and updates < 1:
        raise ConfigError(f"--updates {updates}: at least 1 is needed")
    try:
        words = shlex.split(steps or "")
    except ValueError:
        raise ConfigError(f"--steps {steps}: a quote in it is not closed") from None
    if steps is not None and "{steps}" not in steps:
        raise ConfigError(
            f"--steps {steps}: it needs {{steps}}, as in "
            "--steps '--gradient_accumulation_steps={steps}'"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # an audit is for CPUs, and its ranks would share a GPU
    done: list[Audit] = []
    for number in STEPS if steps else (None,):
        added = [word.replace("{steps}", str(number)) for word in words]
        with tempfile.TemporaryDirectory(prefix="audit-", ignore_cleanup_errors=True) as folder:
            result, code = _run(
                overrides, program, added, updates, Path(folder), output, fake=fake_cuda
            )
        result.steps = number
        done.append(result)
        if code in (EXIT_STOPPED, EXIT_INTERRUPTED):
            return done, EXIT_INTERRUPTED
    states = {result.state for result in done}
    if WRONG in states or (strict and SLOW in states):
        return done, EXIT_FAILED
    return done, EXIT_UNJUDGED if UNJUDGED in states else EXIT_FINISHED


def _run(
    overrides: Sequence[str],
    program: Sequence[str],
    added: Sequence[str],
    updates: int | None,
    folder: Path,
    output: OutputOptions,
    *,
    fake: bool,
) -> tuple[Audit, int]:
    keys = {key_of(override) for override in overrides}
    line = [default for default in DEFAULTS if key_of(default) not in keys]
    line += [*overrides, *OURS, f"run.dir={quote_for_hydra(str(folder / 'run'))}"]
    if program:
        argv = _observed([*program, *added], Path.cwd())
        line += program_overrides(argv, before=line)
    else:
        line += added
        if not keys & {*LENGTHS}:
            line += [f"train.updates={updates or JOB_UPDATES}", "train.samples=null"]
    config = compose(line)
    if config.cluster.kind != "local":
        raise ConfigError(
            f"an audit runs on simulated nodes here, not on cluster={config.cluster.kind}"
        )
    if not program and "command" in config.job:
        raise ConfigError("name a script, as in audit -- train.py, or a job: audit job=digits")
    plan = prepare(config)
    framework = (
        config.job.get("style") if program else check_target(config.job["_target_"]).framework
    )
    if framework not in (None, "torch", "plain"):
        raise ConfigError(f"an audit observes PyTorch; {framework} cannot be observed so")
    traces_in = folder / "traces"
    traces_in.mkdir()
    os.environ |= {
        FOLDER: str(traces_in),
        UPDATES: "" if updates is None else str(updates),
        OBSERVER: "orchestrator.audit.observe:observe_job",
    }
    if fake:
        os.environ[FAKE_CUDA] = "1"
    # The run's last messages name its folder, which is deleted, so they are not shown.
    console = output.console if output.verbose else Console(file=io.StringIO())
    with (
        _inside(folder),
        prepared_run(config, replace(output, console=console), overrides=line, plan=plan) as ready,
    ):
        code = start_run(ready)
        culprit = (ready.run.read_result() or {}).get("culprit")
        log = tail(ready.run.rank_log(0))
    result = Audit(plan.ranks)
    stated_ranks = not program or bool(keys & {key_of(default) for default in DEFAULTS})
    _judge(result, traces_in, code, culprit, log, stated_ranks=stated_ranks)
    return result, code


def _observed(program: Sequence[str], here: Path) -> list[str]:
    """Return the argv that run a script observed."""
    argv = without_python(program)
    name = argv[1] if argv[:1] == ["-m"] and len(argv) > 1 else "".join(argv[:1])
    if PurePath(name).name in (*RANK_STARTERS, "torch.distributed.run"):
        raise ConfigError(
            f"{name} starts ranks by itself, and so does an audit: give the script alone, as in "
            "audit cluster.ranks_per_node=2 -- train.py"
        )
    if argv[0] != "-m":
        script = here / argv[0]
        if not script.is_file():
            raise ConfigError(f"{argv[0]} is no file; an audit needs a Python script")
        argv[0] = str(script)
    return ["-m", PROGRAM, *argv]


def _judge(
    result: Audit,
    traces_in: Path,
    code: int,
    culprit: Mapping[str, Any] | None,
    log: Sequence[str],
    *,
    stated_ranks: bool,
) -> None:
    """Judge the records of the ranks, or say why they cannot be judged.

    Args:
        log: the end of rank 0's, where the script may say why it made no update.
        stated_ranks: their number was typed, or is that of a job.
    """
    failed = None
    if code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        failed = "interrupted"
    elif code:
        failed = describe_culprit(culprit) if culprit else "the script failed"
        result.log = list(culprit["log_tail"]) if culprit else []
    files = [traces_in / f"rank-{rank:05d}.jsonl" for rank in range(result.ranks)]
    if not all(file.exists() for file in files):
        result.reason = failed or "the script did not start on all ranks"
        return
    traces = [read_trace(traces_in, rank) for rank in range(result.ranks)]
    refusals = [str(trace.end["end"]) for trace in traces if trace.end.get("refused")]
    if refusals:
        result.reason = refusals[0]
        return
    if not any(trace.windows for trace in traces):
        backwards = max(int(trace.end.get("backwards", 0)) for trace in traces)
        text = f"the script made {backwards} backward passes, and no update by an optimizer"
        if started := max(int(trace.end.get("processes", 0)) for trace in traces):
            text += f"; it started processes of its own ({started}), which are not observed"
        result.reason = failed or text
        result.log = result.log or list(log)
        names_gpus = any(name in line.lower() for line in result.log for name in ("cuda", "gpu"))
        if names_gpus and not os.environ.get(FAKE_CUDA):
            result.reason += "; --fake-cuda lets scripts for GPUs run on CPUs"
        return
    grouped = any(w.record["grouped"] for trace in traces for w in trace.windows.values())
    if result.ranks > 1 and not stated_ranks and not grouped:
        result.notes.append("the script does not use torch.distributed: judged as one process")
        traces, result.ranks = traces[:1], 1
    result.judgement = judge(traces)
    result.notes += [*result.judgement.notes, *_notes(traces, failed)]


def _notes(traces: Sequence[Trace], failed: str | None) -> list[str]:
    notes = [] if failed is None else [f"judged up to here: {failed}"]
    end = traces[0].end
    length = end["loaders"][0]["length"] if end.get("loaders") else 0
    if length > end.get("backwards", 0):
        updates = len({update for _, update in traces[0].windows})
        steps = max((len(w.steps) for w in traces[0].windows.values()), default=1)
        needed = -(-length // steps)
        notes.append(
            f"the end of an epoch was not reached, where most faults are: --updates {needed} "
            f"(there were {updates}), or a smaller data set"
        )
    if traces[0].skipped:
        notes.append(f"{traces[0].skipped} updates were skipped by the loss scaler")
    return notes


@contextmanager
def _inside(folder: Path) -> Generator[None]:
    """Work in a copy of the current folder, of which each entry is a link; so are its parents'."""
    here = Path.cwd()
    copy = folder / FILES
    copy.mkdir()
    source = Path(here.anchor)
    for part in here.parts[1:]:
        link_entries(source, copy, but=part)
        source, copy = source / part, copy / part
        copy.mkdir()
    link_entries(source, copy)
    os.chdir(copy)
    try:
        yield
    finally:
        os.chdir(here)


# ----------------------------------------------------------------------


def print_audit(result: Audit, console: Console) -> None:
    """Print the verdicts as a table, the worst first, and the fixes of the faults."""
    if result.steps is not None:
        say(console, f"with {result.steps} micro-steps:", "bold")
    judgement = result.judgement
    for line in result.log:
        say(console, f"  {line}", "dim")
    if judgement is None:
        say(console, f"not judged: {result.reason}", "yellow", prose=True)
        return
    table = new_table(("", "verdict", "what was seen", "updates"), ())
    order = {state: n for n, state in enumerate((WRONG, UNJUDGED, SLOW, RIGHT))}
    for row in sorted(ROWS, key=lambda row: (order[judgement.state(row)], ROWS.index(row))):
        state = judgement.state(row)
        here = [f for f in judgement.findings if f.row == row and f.state == state]
        here.sort(key=lambda f: f.update is not None)  # those of the whole run come first
        texts = [f.text for f in here if f.text]
        updates = sorted({f.update for f in here if f.update is not None})
        text = texts[0] if texts else ""
        table.add_row(
            literal(SIGNS[state], console, STYLES[state]),
            row,
            literal(text, console),
            ", ".join(spans(updates)),
        )
    console.print(table)
    for fault in judgement.faults:
        known = FAULTS[fault]
        say(console, f"\n{fault}: {known.about}", "bold")
        say(console, known.effect, prose=True)
        for line in known.fix:
            say(console, f"    {line}", "dim")
    for note in result.notes:
        say(console, f"note: {note}", "yellow", prose=True)
    say(console, _summary(result, judgement), STYLES[result.state], prose=True)


def _summary(result: Audit, judgement: Judgement) -> str:
    updates = len({f.update for f in judgement.findings if f.update is not None})
    errors = [u["relative_error"] for u in judgement.updates]
    of = f"{plural(updates, 'update')} on {plural(result.ranks, 'rank')}"
    if result.state == WRONG:
        off = judgement.state("gradient") != RIGHT and errors
        largest = f"; its gradient is off by up to {max(errors):.2g}" if off else ""
        wrong = {f.fault: None for f in judgement.findings if f.state == WRONG and f.fault}
        return f"wrong: {', '.join(wrong)} ({of}{largest})"
    if result.state == UNJUDGED:
        return f"not judged: {of}"
    text = f"{of}, each that of one big batch (tested; relative error at most {max(errors):.1e})"
    if result.state == SLOW:
        return f"slow: {', '.join(judgement.faults)}; the updates are right: {text}"
    return f"right: {text}"
