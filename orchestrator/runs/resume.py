"""Resume: allowed changes, the configuration and plan that they lead to, and the prepared run."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from orchestrator.clusters.api import Admission, Cluster, Request, cluster_of
from orchestrator.config.changes import OTHER_FOLDER, Change, Kind, changes
from orchestrator.config.command_line import (
    LENGTHS,
    CommandLine,
    check_overrides,
    key_of,
    to_hydra,
    typed_setting,
)
from orchestrator.config.composer import Composer, resolve
from orchestrator.config.messages import config_errors
from orchestrator.config.program import is_program
from orchestrator.config.reading import literal_container, read_config, to_yaml, unknown_keys
from orchestrator.config.schema import Config
from orchestrator.errors import ClusterError, ConfigError, RunFolderError
from orchestrator.interrupt import interrupts
from orchestrator.plan.plan import Plan
from orchestrator.plan.program import ProgramPlan
from orchestrator.plan.recorded_speeds import BALANCE, keep_speeds, kept_speeds
from orchestrator.report.terminal import command, say
from orchestrator.rundir.backup import Backup
from orchestrator.rundir.checkpoints import (
    check_initial,
    initial_state,
    list_checkpoints,
    newest,
    read_newest_attempt,
    refuse_beyond,
    updates_after,
)
from orchestrator.rundir.files import read_text, write_atomically, write_json
from orchestrator.rundir.folder import LABELS, RESUMES, RunDir
from orchestrator.rundir.lock import holder_of, locked
from orchestrator.rundir.metrics import Tail
from orchestrator.rundir.outcome import State, read_outcome
from orchestrator.runs.follow import OutputOptions, PreparedRun, handle_of
from orchestrator.runs.inputs import (
    INPUTS,
    accepted,
    differences,
    has_done_nothing,
    rewritten_data,
)
from orchestrator.runs.recorded import check_own, config_of, plan_of_run, submission_directory
from orchestrator.runs.start import (
    cluster_for,
    labels_of,
    prepare,
    request_admission,
    wrap_disk_errors,
)
from orchestrator.runs.status import statuses
from orchestrator.units import format_count, plural

MOST_UPDATES = 5_000  # compared one by one; of longer runs so many, evenly


def refuse_other_numbers(
    config_changes: list[Change], run: str, done: int, *, program: bool, own_optimizer: bool
) -> None:
    """Raise `ConfigError` naming every change of the run's numbers, with the alternatives.

    Args:
        done: updates that the newest checkpoint holds.
        own_optimizer: the run's configuration has none, so its job builds one.
    """
    others = [change for change in config_changes if change.kind is Kind.NUMBERS]
    if not others:
        return
    lines: list[str] = []
    for change in others:
        why = OTHER_FOLDER.get(change.key) or (
            f"it was {change.text_before}"
            + ", and the updates that are done were made with that" * (done > 0 or program)
        )
        if change.key.startswith("optimizer.") and own_optimizer:
            why = "this run has the optimizer that its job builds"
        lines.append(f"a run cannot go on with {change.text}: {why}")
    if program:
        lines.append(
            f"a program with other arguments is a new run; what this one saved stays in "
            f"{run}/checkpoints"
        )
    else:
        lines.append(
            advise_new_run(run, done, " ".join(typed_setting(c.key, c.after) for c in others))
        )
    raise ConfigError("\n".join(lines))


def advise_new_run(run: str, done: int, settings: str = "these settings") -> str:
    """Return advice on how to train with other settings in a new run."""
    if not done:
        return (
            "no checkpoint was written yet, so a new run loses nothing: launch again with "
            f"{settings}"
        )
    return (
        f"to go on from these weights with other settings, start a new run: "
        f"{typed_setting('train.initial_weights', run)}, or "
        f"{typed_setting('train.initial_state', run)} with its optimizer's state and place in the "
        "data"
    )


def refuse_another_plan(
    old: Plan, new: Plan, done: int, run: str, config_changes: Sequence[Change] = ()
) -> None:
    """Raise `ConfigError` if an update would be of other samples or at another rate.

    Args:
        old, new: of the run as it was, and as it would be.
        done: updates that the newest checkpoint holds.
        config_changes: between the two configurations.
    """
    if new.updates is not None and new.updates < done:
        raise ConfigError(
            f"{done} updates are done already, which is more than the {new.updates} that are asked "
            f"for now; try train.updates={done + 1} or more"
        )
    before, after, instead = old.batch, new.batch, advise_new_run(run, done)
    if after.global_batch != before.global_batch:
        raise ConfigError(
            f"an update would be of {after.global_batch} samples, but was of {before.global_batch} "
            f"so far; to keep it, add accumulation.global_batch={before.global_batch} "
            f"accumulation.steps={before.steps} accumulation.micro_batch=null\n{instead}"
        )
    tokens, tokens_before = after.micro_tokens, before.micro_tokens
    if new.reduction == "reproducible" and tokens != tokens_before:
        raise ConfigError(
            f"accumulation.micro_tokens={tokens}: in reproducible mode it forms the leaves, "
            f"and was {tokens_before} so far; another one is another sum\n{instead}"
        )
    leaf, leaf_before = after.micro_batch_cap, before.micro_batch_cap
    if new.reduction == "reproducible" and leaf != leaf_before:
        raise ConfigError(
            f"accumulation.micro_batch={leaf}: in reproducible mode it is the size of a "
            f"leaf, which was {leaf_before} so far; another one is another sum\n{instead}"
        )
    common = min(old.updates or 0, new.updates or 0)  # 0: one of them is not known yet
    starts = {update for plan in (old, new) for update, _ in plan.order.batch_schedule}
    for update in sorted(starts):
        batches = [plan.order.batch_of(update) for plan in (old, new)]
        if update < max(common, done) and len({*batches}) > 1:
            raise ConfigError(
                f"after update {update} an update would be of {batches[1]} samples, but was to be "
                f"of {batches[0]}: accumulation.batch_schedule can change after update "
                f"{max(common, done)} only\n{instead}"
            )
    step = max(1, common // MOST_UPDATES)
    for update in sorted({*range(0, common, step), *range(common)[-1:]}):
        rates = [
            plan.rates.schedule.learning_rate(update) for plan in (old, new) if plan.rates.schedule
        ]
        if len(set(rates)) > 1:
            of_schedule = [c.text for c in config_changes if c.key.startswith("schedule.")]
            why = f"{' and '.join(of_schedule)} would change it"
            if not of_schedule:
                why = "with schedule.decay the number of updates decides it, which would be another"
            raise ConfigError(
                f"the learning rate of update {update + 1} would be {rates[1]:.6g}, but "
                f"was to be {rates[0]:.6g}: {why}\n{instead}"
            )
        was, would_be = old.order.samples_of(update), new.order.samples_of(update)
        if update < done and was != would_be:
            raise ConfigError(
                f"update {update + 1} was of {was} samples, and would be of {would_be} in the run "
                f"that is asked for now\n{instead}"
            )


def rounding_warning(
    config_changes: list[Change], old: Plan, new: Plan, config: Config
) -> str | None:
    """Return a sentence if the rest agrees with an uninterrupted run only up to rounding."""
    reproducible = config.accumulation.reduction == old.reduction == "reproducible"
    same_split = reproducible or old.split.micro_batches == new.split.micro_batches
    split = [] if same_split else ["another split of the batch"]
    causes = split + [change.text for change in config_changes if change.kind is Kind.ROUNDING]
    if not causes:
        return None
    dropout = (
        ""
        if reproducible
        else ", and random numbers as dropout's are drawn for other micro-batches"
    )
    return (
        f"from here on sums are added in another order ({', '.join(causes)}): results agree with "
        f"those of the undisturbed run up to rounding, not in bits{dropout if split else ''}"
    )


GROUPS = ("cluster", "tracker")  # that a resumed run may choose anew; others decide its numbers
ENDS_EARLY = ("train.patience", "train.keep_best")
PLACES = ("nodes", "ranks_per_node", "cpus_per_rank")  # kept when a run changes its cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """A checked request to resume a run.

    Attributes:
        config: to resume with.
        changes: of the run's configuration, by this command.
        plan: as far as it is known here.
        done: updates that the newest checkpoint holds.
        warning: what a person should know of the changes.
    """

    config: Config
    overrides: tuple[str, ...]
    changes: list[Change]
    plan: Plan | ProgramPlan
    done: int
    warning: str | None

    @property
    def takes_other_speeds(self) -> bool:
        """Return whether the run is to continue with another run's recorded speeds, or none."""
        return BALANCE in {change.key for change in self.changes}

    def is_complete(self, result: Mapping[str, Any] | None) -> bool:
        """Return whether a run that ended with `result` has nothing left to do."""
        if result is None or result["state"] != "finished":
            return False
        if "ended_early" in result:
            return not any(change.key in ENDS_EARLY for change in self.changes)
        return (self.plan.updates or 0) <= int(result["updates"])

    @property
    def message(self) -> str:
        """Describe the next steps, for people."""
        where = "there is no checkpoint yet: beginning again"
        if isinstance(self.plan, ProgramPlan):
            where = "starting the program again, to go on from what it saved"
        elif self.done:
            total = self.plan.updates
            of = "" if total is None else f" of {format_count(total)}"
            where = f"going on after update {format_count(self.done)}{of}"
        ranks = f"{plural(self.plan.ranks, 'rank')} on {plural(self.plan.nodes, 'node')}"
        return ", ".join([where, ranks, *(f"{c.text} (was {c.text_before})" for c in self.changes)])


def resumption(
    run: RunDir,
    config: Config,
    overrides: Sequence[str],
    config_dir: str | None = None,
    *,
    to: Config | None = None,
) -> Resumption:
    """Check the request `resume RUN overrides`; nothing is written.

    Args:
        config: of the run so far.
        to: the whole requested configuration, overrides already applied.

    Raises:
        ConfigError: an unknown key, an invalid value, or a change of the run's numbers.
        RunFolderError: the newest checkpoint is of more updates than `config` asks for.
    """
    before = asdict(config)
    saved = list_checkpoints(run.checkpoints)
    done = updates_after(saved[-1]) if saved else 0
    known = run.read_plan()
    old = plan = plan_of_run(config, known)
    refuse_beyond(run, done, plan.updates)
    config_changes: list[Change] = []
    warning: str | None = None
    if overrides or to is not None:
        if to is None:
            config = _with_overrides(asdict(config), overrides, config_dir)
        else:  # with the present path of the folder, which may have moved or be behind a link
            config = replace(to, run=replace(to.run, dir=config.run.dir))
        config_changes = changes(before, asdict(config))
        program = isinstance(old, ProgramPlan)
        own = not program and not before["optimizer"]
        refuse_other_numbers(
            config_changes, str(run.path), done, program=program, own_optimizer=own
        )
        plan = plan_of_run(config, known)
        if isinstance(old, Plan) and isinstance(plan, Plan):
            refuse_another_plan(old, plan, done, str(run.path), config_changes)
            warning = rounding_warning(config_changes, old, plan, config)
    return Resumption(
        config=config,
        overrides=tuple(overrides),
        changes=config_changes,
        plan=plan,
        done=done,
        warning=warning,
    )


def _with_overrides(
    old: dict[str, Any], overrides: Sequence[str], config_dir: str | None
) -> Config:
    """Return the configuration `old` with the overrides. Raises `ConfigError`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    check_overrides(overrides, verb="resume")
    values = literal_container(old)
    keys = {key_of(text) for text in overrides}
    with config_errors():
        for text in sorted(overrides, key=lambda text: "." in key_of(text)):  # groups first
            [override] = OverridesParser.create().parse_overrides([to_hydra(text)])
            if override.is_sweep_override() or override.is_delete() or override.package:
                raise ConfigError(f"resume takes KEY=VALUE, but was given {text}")
            key, value = override.key_or_group, override.value()
            # `transport` has no dot, but is a plain key and no config group.
            if "." in key or not isinstance(value, str) or key == "transport":
                OmegaConf.update(values, key, value, force_add=True)
                continue
            if key not in GROUPS:
                raise ConfigError(
                    f"resume cannot take {text}: it changes what is computed; it takes other "
                    f"values of single keys, and {' or '.join(f'{name}=…' for name in GROUPS)}"
                )
            placed = _placement(old, overrides) if key == "cluster" else []
            line = CommandLine(overrides=(f"{key}={value}", *placed), config_dir=config_dir)
            chosen = Composer(line).compose().values
            values[key] = chosen[key]
            if key == "cluster" and "transport" not in keys and chosen["transport"] != "auto":
                values.transport = chosen["transport"]
        if lengths := keys & {*LENGTHS}:
            # The lengths of the run so far would win over the typed one.
            for key in {"train.updates", "train.samples"} - lengths:
                OmegaConf.update(values, key, None)
        plain = resolve(values)
    if sentences := unknown_keys(plain):
        raise ConfigError("\n".join(sentences))
    return read_config(plain)


def _placement(old: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """Return the ranks of the run, or those asked for, to which a cluster's file may refer."""
    of_run = {f"cluster.{name}": old["cluster"][name] for name in PLACES}
    recorded = [f"{key}={json.dumps(value)}".replace('"', "") for key, value in of_run.items()]
    return [*recorded, *(text.lstrip("+") for text in overrides if key_of(text) in of_run)]


def changed_inputs(run: RunDir, resumed: Resumption) -> list[str]:
    """Return what has changed in the code and data of a run since it began, or since a resume
    accepted what had changed. Nothing counts where no update is done, nor other paths of data that
    are asked for, nor initial weights: the run has a copy.
    """
    return differences(run, _inputs_that_count(run, resumed), resumed.config)


def _inputs_that_count(run: RunDir, resumed: Resumption) -> dict[str, Any]:
    """Return the recorded inputs of a run that a resume compares, as `changed_inputs` says."""
    if not resumed.done and (
        not is_program(resumed.config.job) or has_done_nothing(run, resumed.config)
    ):
        return {}
    before = run.read_submission().get(INPUTS) or {}
    moved = {
        "train.initial_weights",
        "train.initial_state",
        *(change.key for change in resumed.changes),
    }
    data = {key: stamp for key, stamp in (before.get("data") or {}).items() if key not in moved}
    return {**before, "data": data}


def refuse_changed(inputs_by_run: Mapping[str, Sequence[str]]) -> None:
    """Raise `ConfigError` with the changed inputs of each run, by folder."""
    sentences = [
        f"{', '.join(changed)} since {run} began" for run, changed in inputs_by_run.items()
    ]
    ways = (
        "the updates so far were computed with the earlier state; to go on all the same, add "
        "--changed; to compute everything anew, start a new run"
    )
    raise ConfigError("\n".join([*sentences, ways]))


def record(
    run: RunDir,
    resumed: Resumption,
    attempt: int,
    inputs: Sequence[str],
    *,
    accepts_changes: bool = False,
) -> None:
    """Record that a person requested `attempt`, with its overrides; then change config.yaml.

    Args:
        inputs: of the run that have changed and were accepted, as sentences.
        accepts_changes: also of data that no argument names, of which only the ranks find out.

    The configuration of the attempts before stays readable in the folder of the last of them. At
    every moment config.yaml is whole, the old one or the new one.
    """
    entry = {
        "attempt": attempt,
        "time": time.time(),
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "overrides": list(resumed.overrides),
        "changes": {c.key: [c.before, c.after] for c in resumed.changes},
        "changed_inputs": list(inputs),
        "accepts_changes": accepts_changes,
    }
    write_json(run.resumes, {RESUMES: [*run.read_resumes(), entry]})
    if inputs or resumed.changes or not resumed.done:
        noted = run.read_submission()
        now = accepted(noted.get(INPUTS) or {}, resumed.config)
        write_json(run.submission, {**noted, INPUTS: now})
    if not resumed.changes:
        return
    attempts = run.attempts_made()
    if attempts and run.attempt(attempts - 1).is_dir():
        copy = run.attempt(attempts - 1) / run.config.name
        if not copy.exists():
            write_atomically(copy, read_text(run.config))
    run.write_config(to_yaml(resumed.config))
    write_json(run.plan, resumed.plan.to_json())
    cluster = cluster_of(resumed.config)
    noted = {k: v for k, v in run.read_submission().items() if k not in LABELS}
    write_json(run.submission, {**noted, **labels_of(resumed.config), **cluster.placed})
    if cluster.attended and run.handle.exists():  # the job that it names is over
        if attempts:
            run.handle.rename(run.attempt(attempts - 1) / run.handle.name)
        else:
            run.handle.unlink()


@contextlib.contextmanager
def prepared_resume(
    path: Path,
    output: OutputOptions,
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    *,
    to: Config | None = None,
    changed: bool = False,
    checked: bool = False,
) -> Generator[PreparedRun | None]:
    """Prepare a run to resume from its newest valid checkpoint, or from the start when it has
    none, as `prepared_run` does: check the request, then whether the run allows it now, and record
    it.

    Args:
        overrides: of its configuration: what leaves its numbers as they are, or more updates.
        config_dir: a folder of the user's own configs, for `cluster=…` among the overrides.
        to: the whole configuration to resume with, overrides already applied.
        changed: resume although the code or data has changed.
        checked: its inputs were, with those of other runs; what has changed since is only noted.

    Returns:
        None if it has finished already; prints that.
    """
    run = RunDir(path).existing()
    check_own(run)
    Tail(run.metrics, recent=0)  # whether it can be read at all
    try:
        resumed = resumption(run, config_of(run), overrides, config_dir, to=to)
    except ConfigError:
        # First: other keys, for which that refusal asks, would not help a run in progress.
        with contextlib.suppress(ClusterError):  # the scheduler does not answer
            _refuse_in_progress(run, holder_of(run) or handle_of(run).in_progress())
        raise
    result = run.read_result() or _end_by_status(run, resumed.config, output)
    if resumed.is_complete(result):
        early = f" early ({result['ended_early']})" if result and "ended_early" in result else ""
        say(output.console, f"{path} has finished already{early}; there is nothing to resume")
        if not is_program(resumed.config.job):
            longer = "train.patience=null" if early else "train.updates=…"
            say(output.console, f"to train on: {command('resume', path)} {longer}", "dim")
        yield None
        return
    # What a job's configuration names is meant from where the run was submitted. The lock comes
    # before the checks: what they find must still hold when the attempt is recorded.
    with submission_directory(run), interrupts, wrap_disk_errors(run), locked(run):
        allowed = _allow(run, resumed, output, changed=changed, checked=checked)
        with _recorded(run, resumed, allowed, output) as ready:
            yield ready


def _end_by_status(run: RunDir, config: Config, output: OutputOptions) -> dict[str, Any] | None:
    """Return the end of a program whose ranks have all finished, and which has no result; None if
    its status knows none.

    Its batch script writes the result, and may have been killed before; `status` derives it then.
    A job class needs none of this: its rank 0 writes the result.
    """
    if not is_program(config.job):
        return None
    outcome = read_outcome(run, run.latest_attempt)
    if outcome is None or outcome.state is not State.FINISHED:
        return None  # a status might requeue the job, though a person asks for another start
    [status], sentences = statuses([run])
    for sentence in sentences:
        say(output.console, f"warning: {sentence}", "yellow", prose=True)
    if (result := run.read_result()) is not None:
        return result
    # Where the result cannot be written, the finished run must not begin again either.
    finished = status.state == State.FINISHED.value
    return {"state": status.state, "updates": status.updates} if finished else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _AllowedAttempt:
    """The attempt that a resumption may begin.

    Attributes:
        number: of the attempt.
        inputs: of the run that have changed and were accepted, as sentences.
        accepts_changes: these and others were.
        notes: what a person should know of the run's state.
        request, admission: to the cluster, and from it.
    """

    number: int
    cluster: Cluster
    inputs: Sequence[str]
    accepts_changes: bool
    notes: Sequence[str]
    request: Request
    admission: Admission


def _allow(
    run: RunDir, resumed: Resumption, output: OutputOptions, *, changed: bool, checked: bool
) -> _AllowedAttempt:
    """Check that the run may resume now; nothing is written.

    Args:
        changed: although the code or data has changed.
        checked: as of `prepared_resume`.

    Raises:
        RunFolderError: the run is in progress, or what it would continue from is damaged.
        ConfigError, ClusterError: its code or data has changed, or the cluster refuses.
    """
    config = resumed.config
    cluster = cluster_for(config, output)
    cluster.trust(run, {change.key for change in resumed.changes})
    # First: --changed, for which the next refusal asks, would not help a run in progress.
    _refuse_in_progress(run, handle_of(run).in_progress())
    inputs = changed_inputs(run, resumed)
    if inputs and not (changed or checked):
        refuse_changed({str(run.path): inputs})
    notes = [f"{sentence} since the run began; going on all the same" for sentence in inputs]
    rewritten = rewritten_data(run, _inputs_that_count(run, resumed), config)
    notes += rewritten
    if changed:  # or else the ranks refuse it once more, if its samples are others
        inputs += rewritten
    if not is_program(config.job):
        # Verified here only where ranks run here; elsewhere they verify the files themselves.
        checkpoint, passed_over = newest(run.checkpoints, run.identity, contents=cluster.attended)
        if checkpoint is None and cluster.attended and config.train.initial_weights is not None:
            check_initial(run)
        if checkpoint is None and cluster.attended and config.train.initial_state is not None:
            initial_state(run)
        if checkpoint is None and run.attempts_made():
            notes.append(f"{run.path} has no checkpoint yet: it begins again at update 0")
        notes += passed_over
    elif run.attempts_made() and has_done_nothing(run, config):
        notes.append(f"{run.path} has no update and no checkpoint yet: its program begins anew")
    if resumed.changes:
        prepare(config, new=False)
        if not resumed.takes_other_speeds:
            kept_speeds(config, run)  # whether its copy of them can be read
    number = run.attempts_made()
    if not cluster.attended:
        # A folder listed on NFS may lack the attempt that another node has just begun; a file that
        # is opened does not.
        number = max(number, read_newest_attempt(run.newest_attempt) + 1)
    request, admission = request_admission(cluster, run, number, output)
    return _AllowedAttempt(
        number=number,
        cluster=cluster,
        inputs=inputs,
        accepts_changes=changed,
        notes=notes,
        request=request,
        admission=admission,
    )


def _refuse_in_progress(run: RunDir, who: str) -> None:
    """Raise `RunFolderError` if a launcher or a job, `who`, runs it."""
    if who:
        raise RunFolderError(
            f"{run.path} is in progress ({who}); to stop it first: {command('cancel', run.path)}"
        )


@contextlib.contextmanager
def _recorded(
    run: RunDir, resumed: Resumption, allowed: _AllowedAttempt, output: OutputOptions
) -> Generator[PreparedRun]:
    """Record the attempt in the run's folder, which is as before if it does not begin."""
    output.note(resumed.message, prose=True)
    for sentence in (*filter(None, [resumed.warning]), *allowed.notes):
        say(output.console, f"warning: {sentence}", "yellow", prose=True)
    ready = PreparedRun(
        run=run,
        cluster=allowed.cluster,
        request=allowed.request,
        output=output,
        handle=run.read_handle(),
        backup=Backup.of(run),  # before anything is written
    )
    try:
        if resumed.takes_other_speeds:
            keep_speeds(resumed.config, run)
        record(
            run,
            resumed,
            allowed.number,
            allowed.inputs,
            accepts_changes=allowed.accepts_changes,
        )
        if notice := allowed.admission.notice:
            write_json(run.submission, {**run.read_submission(), **notice})
        # Of the attempt before: they would end the new one, or be taken for its result.
        for file in (run.cancel, run.pruned, run.result):
            file.unlink(missing_ok=True)
        yield ready
    except BaseException:
        with contextlib.suppress(OSError, RunFolderError):  # the error itself matters more
            ready.withdraw()
        raise
