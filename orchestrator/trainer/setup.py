"""Setup of a rank: its job, group, engine and plan, and the checkpoint that it starts from."""

from __future__ import annotations

import importlib
import inspect
import os
import shlex
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from orchestrator.agent.topology import interface_variables
from orchestrator.client.checkpoints import Checkpoints
from orchestrator.client.loop import (
    Callback,
    TrainingProgress,
    configured_callbacks,
    describe_misuse,
)
from orchestrator.client.run import current_run
from orchestrator.config.job_source import check_target, refuse_arguments
from orchestrator.config.optimizer import base_rate
from orchestrator.config.reading import read_config, with_run_folder
from orchestrator.config.rules import callback_names, refuse_unsupported, with_survival
from orchestrator.config.schema import Config
from orchestrator.data import HeldOutData
from orchestrator.engine.api import Engine, EngineSettings, Framework, Group, GroupSpec, Survives
from orchestrator.engine.common.job_checks import warn_of_names
from orchestrator.engine.common.waiting import LONGEST_WAIT_S, declared, for_others
from orchestrator.errors import (
    ConfigError,
    Evicted,
    JobError,
    OrchestratorError,
    RunFolderError,
)
from orchestrator.job import (
    REQUIRED_METHODS,
    Job,
    dataset_of,
    evaluates,
    has_own_rate,
    is_coupled,
)
from orchestrator.machine import visible_gpus
from orchestrator.plan.order import Shards
from orchestrator.plan.parts import JobFacts, branch_in
from orchestrator.plan.plan import Plan
from orchestrator.plan.plan_warnings import balance_text
from orchestrator.plan.recorded_speeds import SpeedChanges, kept_speeds
from orchestrator.plugins import FRAMEWORKS
from orchestrator.report.environments import warnings_of
from orchestrator.rundir import checkpoints as checkpoint
from orchestrator.rundir.checkpoints import split_reference
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import BRANCH, RunDir
from orchestrator.rundir.metrics import (
    CHANGES,
    RECENT_BYTES,
    Figures,
    StoredHistory,
    Tail,
    read_metrics,
    read_metrics_around,
)
from orchestrator.rundir.outcome import State
from orchestrator.rundir.warnings import warn
from orchestrator.snapshot import submitted
from orchestrator.source.git import code_state
from orchestrator.source.modules import folder_of
from orchestrator.trainer.best import BestCheckpoint
from orchestrator.trainer.environment import describe_environment, device_request
from orchestrator.trainer.evaluation import agreed_held_out
from orchestrator.trainer.failure import describe
from orchestrator.trainer.recorder import Recorder, check_tracker
from orchestrator.trainer.same_inputs import (
    agreed_lengths,
    agreed_samples,
    agreed_survival,
    compare_facts,
    own_rates,
    refuse_different_costs,
)
from orchestrator.trainer.survival import GroupMembership
from orchestrator.trainer.worker import WorkerProcess
from orchestrator.units import plural


@dataclass(kw_only=True, slots=True)
class Training:
    """State of one rank's training, from its first window to its last.

    Attributes:
        group: the first one.
        updates: of the whole run.
        rates: the job's own learning rates, if any.
        held_out: what all ranks evaluate together; None where the job has none.
        best: watches the figure of `train.keep_best`, in the present group.
        callbacks: of the job, then those of `run.callbacks`.
        membership: None where losses are not survived.
        recorded_speeds: that the run repeats, if any.
        recorder: on rank 0, the one that writes. If that rank dies, another makes its own.
        in_boundary: weights and optimizer may be changing.
    """

    run: RunDir
    attempt: int
    config: Config
    job: Job
    engine: Engine
    checkpoints: Checkpoints
    group: Group
    planned: Plan
    updates: int
    rates: Callable[[int], float] | None
    held_out: HeldOutData | None = None
    best: BestCheckpoint | None = None
    callbacks: Sequence[Callback] = ()
    membership: GroupMembership | None = None
    recorded_speeds: SpeedChanges = field(default_factory=list)
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    recorder: Recorder | None = None
    in_boundary: bool = False

    def restore(self, rank: int) -> bool:
        """Load the newest valid checkpoint, if any; return whether there is one. Collective."""
        position = self.checkpoints.restore(rank)
        if position is not None:
            self.progress.updates, self.progress.samples = position
        return position is not None

    def save(self) -> None:
        """Write a checkpoint after the last update. Collective."""
        if self.progress.updates:
            self.checkpoints.collect(self.progress.updates, self.progress.samples)
            if self.recorder is not None:
                self.checkpoints.save_now(self.progress)
            self.checkpoints.complete_parts(wait=True)

    @property
    def evaluates_together(self) -> bool:
        """Return whether all ranks evaluate: a job's held-out data, or a model in shards."""
        return self.held_out is not None or self.config.engine.shard_model != "none"

    @property
    def saves_on_failure(self) -> bool:
        """Return whether this rank can save the last boundary's state when another one fails.

        An engine that could continue in another group still has that state.
        """
        whole = self.checkpoints.can_save() and self.engine.part() is None
        return whole and isinstance(self.engine, Survives)

    def go_back(self, rank: int) -> int | None:
        """Load the newest checkpoint; return how many updates that loses, None without one."""
        self.checkpoints.wait()  # one that is being written counts
        before = self.progress.updates
        if not self.restore(rank):
            return None
        self.progress.go_back()
        return max(0, before - self.progress.updates)

    def record(self) -> Recorder:
        """Make this rank the one that writes, and note how many collectives its group needs."""
        if self.recorder is None:
            self.recorder = Recorder(
                self.run, self.attempt, self.config, self.engine, self.checkpoints, self.updates
            )
        ranks = self.membership.size if self.membership else self.planned.ranks
        self.recorder.note["planned_collectives"] = self.planned.traffic.among(ranks)
        return self.recorder

    def close_tracker(self, state: State) -> None:
        """Close the tracker, if it is this rank's; the run ended in `state`."""
        if self.recorder is not None:
            self.recorder.scalars.close(state)

    def take_over_record(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """On rank 0 of a new group, record changes; continue the record of a lost rank 0."""
        progress, took_over = self.progress, self.recorder is None
        recorder = self.record()
        if took_over:
            self.recall()
            history = read_metrics(self.run.metrics)
            own_changes = [
                line for line in history.changes if line.get("attempt", 0) == self.attempt
            ]
            recorder.generation = max((line["generation"] for line in own_changes), default=0)
            recorded = history.updates[-1]["update"] + 1 if history.updates else 0
            progress.recorded = min(recorded, progress.updates)
            first = (
                progress.recent_updates[0].window.update
                if progress.recent_updates
                else progress.updates
            )
            if progress.recorded < first:
                warn(
                    f"metrics.jsonl lacks updates {progress.recorded + 1} to {first}: the rank "
                    f"that wrote it is gone, and there had been no room for its lines"
                )
        recorder.record_changes(changes, progress.updates)

    def complete_record(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Write the updates that metrics.jsonl lacks, on the rank that saves them at a failure."""
        if self.recorder is None:  # the rank that writes is lost, or has not come so far
            self.take_over_record(changes)
        recorder, progress = self.record(), self.progress
        for done in progress.recent_updates:
            if done.window.update >= progress.recorded:
                recorder.on_boundary(done)
        progress.recorded = progress.updates

    def recall(self) -> None:
        """Take from the record what it says of the last update: from its end, where that is."""
        progress = self.progress
        if not progress.updates:
            return
        last = progress.updates - 1
        history = read_metrics_around(self.run.metrics, last)
        if record := history.update(last):
            progress.loss = record["loss"]
        if record := history.evaluation(last):
            progress.evaluated, progress.evaluation = progress.updates, record["evaluation"]

    def require_applied(self) -> None:
        """On the rank that writes, refuse a training that has changed no weight.

        Raises:
            JobError: no update of any attempt was applied.
        """
        path = self.run.metrics
        # In almost every run one of the last updates was applied, which spares reading the others.
        recent = StoredHistory(Tail(path, RECENT_BYTES)).updates
        if any(record.get("applied", True) for record in recent):
            return
        updates = read_metrics(path).updates
        if self.progress.updates and not any(record.get("applied", True) for record in updates):
            raise JobError(
                f"none of {plural(self.progress.updates, 'update')} was applied, so the weights "
                "are those of the beginning: each had a loss or gradient that is not finite "
                "(train.on_non_finite=skip, or float16), or nothing in it counted (a weight of 0)"
            )

    def _best_figure(self) -> dict[str, Any]:
        """Return what result.json says of the best evaluation."""
        figure = None if self.best is None else self.best.figure
        if figure is None or not figure.updates:
            return {}
        summary: dict[str, Any] = {"best": figure.to_json()}
        if self.progress.ended_early:
            many = plural(figure.without, "evaluation")
            summary["ended_early"] = f"no better {figure.objective} in {many}"
        return summary

    def facts_of_ranks(self) -> dict[str, Any]:
        """Return values of result.json that all ranks know together. Collective.

        `memory` has bytes by what they are for, and their peak, a number for each rank, as
        `seconds_of_ranks` has those of work and waiting in this attempt's updates;
        `weights_sha256` is among them if no rank holds all weights.
        """
        engine = self.engine
        own_memory = {**engine.memory_bytes(), "peak": engine.peak_memory_bytes()}
        times = self.progress.work_s, self.progress.wait_s
        rows = engine.gather([*times, *(float(size) for size in own_memory.values())])
        work, wait, *sizes = zip(*rows, strict=True)
        facts: dict[str, Any] = {
            "memory": {
                name: list(map(int, row)) for name, row in zip(own_memory, sizes, strict=True)
            },
            "seconds_of_ranks": {
                "work": [round(s, 3) for s in work],
                "wait": [round(s, 3) for s in wait],
            },
        }
        if engine.part() is not None:
            facts["weights_sha256"] = engine.weights_sha256()
        return facts

    def result(self, facts: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the values of result.json, which rank 0 writes when a run ends well or is stopped.

        Args:
            facts: `facts_of_ranks`; `memory` in the result is that of the largest, in bytes.
            seconds: of this attempt.
        """
        progress, recorded = self.progress, read_metrics(self.run.metrics)
        figures = Figures(recorded.updates)  # of all attempts
        changes = {key: [line[key] for line in recorded.changes if key in line] for key in CHANGES}
        return {
            "state": (State.STOPPED if progress.stopped else State.FINISHED).value,
            "updates": progress.updates,
            "samples": progress.samples,
            "loss": progress.loss,
            "metrics": progress.evaluation,
            "optimizer": self.engine.optimizer_used(),
            "weights_sha256": facts.get("weights_sha256") or self.engine.weights_sha256(),
            "peak_memory_bytes": facts["memory"]["peak"],
            "memory": {name: max(sizes) for name, sizes in facts["memory"].items()},
            "seconds_of_ranks": facts["seconds_of_ranks"],
            "collectives": figures.total("collectives") or 0,
            "bytes_on_wire": figures.total("bytes_on_wire") or 0,
            "seconds": seconds + figures.seconds_before(self.attempt),
            "planned_updates": self.planned.updates,
            "planned_collectives_per_update": self.planned.traffic.collectives,
            "culprit": None,
            "restarts": self.run.restarts(),
            **self._best_figure(),
            **{key: notes for key, notes in changes.items() if notes},
        }


def set_up(worker: WorkerProcess) -> Training:
    """Build what this rank trains with, and restore the run's state. Collective; a replacement of a
    lost rank does so alone, until the others let it in.

    Raises:
        Evicted: for any error of a replacement, without which the others train on.
    """
    try:
        with declared("it prepares its job and data"):
            return _set_up(worker)
    except BaseException as error:
        if isinstance(error, Evicted) or not worker.topology.incarnation:
            raise
        if not isinstance(error, OrchestratorError):
            traceback.print_exception(error)
        raise Evicted(f"this replacement failed to start: {describe(error)}") from error


def _set_up(worker: WorkerProcess) -> Training:
    run, topology = worker.run, worker.topology
    config = read_config(run.existing().read_config())
    worker.begin(config)
    worker.defer_notice()
    plan_before = run.read_plan()  # before rank 0 writes the next one
    is_replacement = topology.incarnation > 0
    spec = _group_spec(worker, config)
    if config.engine.shard_model != "none":  # for the groups that torch forms by itself
        os.environ.update(interface_variables(os.environ, topology.address))
    job, framework = _make_job(worker, config, spec)
    group = _form_group(replace(spec, rank=0, size=1) if is_replacement else spec, framework)
    if is_replacement:
        config = with_survival(config, on=True)
    else:
        config = agreed_survival(config, job, group)
    training = _build_training(worker, config, job, framework, group)
    if config.run.survive:
        training.membership = GroupMembership(
            spec,
            config.cluster,
            framework,
            training.engine,
            worker,
            updates=training.updates,
            go_back=training.go_back,
        )
    if is_replacement and training.membership is not None:
        training.membership.join(job, training.progress, lambda: worker.stop.requested)
        return training
    _restore_state(training, topology.rank, plan_before)
    if topology.rank == 0:
        _begin_record(training, framework)
    if training.membership is not None:
        training.membership.begin(job, group)
    return training


def _group_spec(worker: WorkerProcess, config: Config) -> GroupSpec:
    """Return the specification of the attempt's first group, as this rank takes part in it."""
    topology, stop = worker.topology, worker.stop
    return GroupSpec(
        rank=topology.rank,
        size=topology.size,
        local_rank=topology.local_rank,
        node=topology.node,
        address=topology.address,
        incarnation=topology.incarnation,
        folder=worker.run.attempt(worker.attempt),
        transport=config.transport,
        timeout_s=config.cluster.rendezvous_timeout_s,
        collective_timeout_s=LONGEST_WAIT_S,  # the agents judge how long a rank is waited for
        survive=bool(config.run.survive),
        ranks_per_node=topology.size // topology.nodes,
        device_request=device_request(config.cluster, os.environ, scheduled=topology.scheduled),
        stop_requested=lambda: stop.requested,
    )


def _make_job(worker: WorkerProcess, config: Config, spec: GroupSpec) -> tuple[Job, Framework]:
    """Import the job's class and call it; return the job and its framework.

    The framework prepares meanwhile, if the job's source says which one it is.

    Raises:
        ConfigError: of the tracker, or a key that the job's engine does not have.
        JobError: as `build_job` and `framework_of`.
    """
    run, topology = worker.run, worker.topology
    check_tracker(config.tracker.kind)
    name_in_source = check_target(config.job["_target_"]).framework
    if name_in_source is not None and FRAMEWORKS.refusal(name_in_source) is None:
        FRAMEWORKS.make(name_in_source, Framework).ahead(spec)  # slow, before the job's import
    class_name = str(config.job["_target_"]).rpartition(".")[2]
    current_run.enter_job(class_name, run.path, worker.attempt, topology.rank, topology.size)
    job = build_job(with_run_folder(config.job, str(run.path)))
    warn_of_names(job)
    name = framework_of(job)
    refuse_unsupported(config, name, coupled=is_coupled(job))  # its source may not have told
    return job, FRAMEWORKS.make(name, Framework)


def _form_group(spec: GroupSpec, framework: Framework) -> Group:
    """Form this rank's group. Collective. Warn of ranks on CPUs although there are GPUs."""
    with for_others("their group to form"):
        group = framework.form_group(spec)
    on_cpus = spec.transport == "auto" and group.transport == "gloo" and group.rank == 0
    if on_cpus and (gpus := visible_gpus(os.environ)):
        warn(
            f"ranks train on CPUs, although node 0 has {plural(len(gpus), 'GPU')} for them: torch "
            "cannot give each rank one. transport=nccl says why, transport=gloo that CPUs are meant"
        )
    return group


def _build_training(
    worker: WorkerProcess, config: Config, job: Job, framework: Framework, group: Group
) -> Training:
    """Build the engine, the plan of the actual data, and what else trains. Collective.

    Args:
        config: with the resolved `run.survive`.

    Returns:
        The training before its first update, without a membership or a state.
    """
    run = worker.run
    engine = framework.build_engine(job, engine_settings(config, job), group)
    planned = _planned(config, job, engine, worker.topology.nodes, run)
    assert planned.updates is not None  # noqa: S101  # the data set is known here
    checkpoints = Checkpoints(
        run.checkpoints,
        engine,
        run=run.identity,
        keep=config.train.keep_checkpoints,
        keep_every=config.train.keep_every,
        background=config.train.checkpoint_in_background,
        best=run.best,
    )
    training = Training(
        run=run,
        attempt=worker.attempt,
        config=config,
        job=job,
        engine=engine,
        checkpoints=checkpoints,
        group=group,
        planned=planned,
        updates=planned.updates,
        rates=own_rates(job, config.schedule, engine, planned.updates),
        held_out=agreed_held_out(engine, job, by_length=planned.work is not None),
        callbacks=[*_callbacks_of(job), *configured_callbacks(callback_names(config))],
        recorded_speeds=kept_speeds(config, run),
    )
    if config.train.keep_best is not None and training.held_out is None and not evaluates(job):
        raise ConfigError(
            f"train.keep_best={config.train.keep_best}: {type(job).__name__} has no held-out "
            "figures, as it defines neither evaluate(model) nor validation()"
        )
    return training


def _restore_state(training: Training, rank: int, plan_before: Mapping[str, Any]) -> None:
    """Load the newest checkpoint, or the initial state or weights of a run without one; recall
    what the record says of its last update. Collective.

    Args:
        plan_before: plan.json of the attempt before, or as the run was submitted.

    Raises:
        JobError: the checkpoint is of other data.
        ConfigError: the initial state or weights are of another model.
        RunFolderError: the checkpoint is of more updates than are planned.
    """
    run, train, progress = training.run, training.config.train, training.progress
    training.restore(rank)
    if progress.updates:
        _refuse_other_data(run, plan_before, training.planned)
    checkpoint.refuse_beyond(run, progress.updates, training.planned.updates)
    if train.initial_state is not None and not progress.updates:
        _load_initial_state(training, rank)
    if train.initial_weights is not None and not progress.updates:
        checkpoint.check_initial(run)
        try:
            training.engine.load_weights(run.initial_weights)
        except ConfigError as error:  # of the run's copy, which the user has not named
            raise ConfigError(f"train.initial_weights={train.initial_weights}: {error}") from error
    if rank == 0 or training.evaluates_together:
        training.recall()


def _begin_record(training: Training, framework: Framework) -> None:
    """On rank 0, write environment.json and plan.json, and give the warnings known by now."""
    run, engine, planned = training.run, training.engine, training.planned
    copied = submitted(os.environ)
    code = copied["git"] if copied else code_state(folder_of(type(training.job)))
    environment = describe_environment(framework.versions(), training.group.transport, code)
    environment["optimizer"] = engine.optimizer_used()
    before: dict[str, Any] | None = None
    try:
        before = run.read_environment()
    except RunFolderError as error:
        warn(f"{error}; so whether this start computes with the same is unknown")
    micro_batches = sum(map(len, planned.split.micro_batches))
    changed = warnings_of(environment, before)
    unread = [f"{code['error']}; so the code's commit is unknown"] if code["error"] else []
    for sentence in (*engine.warnings(micro_batches), *changed, *planned.warnings, *unread):
        warn(sentence)
    write_json(run.environment, environment)
    figures = planned.to_json()
    if planned.work is not None:
        print(f"work by length: {balance_text(figures)}", flush=True)  # to its log
    write_json(run.plan, figures)
    training.record()


def _refuse_other_data(run: RunDir, before: Mapping[str, Any], planned: Plan) -> None:
    """Raise `JobError` if a run continues with data that the plan `before` was not made for."""
    resumes = run.read_resumes()
    if resumes and resumes[-1].get("changed_inputs"):
        return
    setting = shlex.quote(f"train.initial_weights={run.path}")
    instead = f"bring it back, or start another run with {setting}"
    samples, samples_before = planned.length.dataset_samples, before.get("dataset_samples")
    if samples_before not in (None, samples):
        raise JobError(
            f"the data set has {samples} samples, but had {samples_before} so far, so they "
            f"would come in another order: {instead}"
        )
    known = before.get("lengths_digest")
    if planned.work is not None and known not in (None, planned.lengths_digest):
        raise JobError(
            f"the samples have other lengths than so far, so it is another data set: {instead}"
        )


# Options of optimizers that add to their state, by torch's names.
STATEFUL = ("amsgrad", "centered", "momentum")


def _load_initial_state(training: Training, rank: int) -> None:
    """Begin with the state of another run, of which this one has a copy. Collective.

    Raises:
        ConfigError: it is that of another optimizer or model.
    """
    run, engine, reference = training.run, training.engine, training.config.train.initial_state
    initial = checkpoint.initial_state(run)
    training.checkpoints.check(initial, rank)
    begun = run.read_submission().get(BRANCH) or {}
    why: object = other_optimizer(begun.get("optimizer"), engine.optimizer_used())
    if why is None:
        try:
            engine.load_initial_state(initial.folder, initial.extra)
        except (JobError, RunFolderError) as error:
            why = error
    if why is not None:
        setting = shlex.quote(f"train.initial_weights={split_reference(str(reference))[0]}")
        raise ConfigError(
            f"train.initial_state={reference}: {why}. To begin with its weights alone: {setting}"
        )


def other_optimizer(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str | None:
    """Return a sentence if the state of one optimizer is not for another; None if it is.

    Args:
        before, now: of environment.json; None if it is not known.

    >>> other_optimizer({"class": "a.Adam"}, {"class": "a.SGD"})
    'its optimizer is a.Adam, whose state a.SGD cannot use'
    """
    if before is None:
        return None
    if before["class"] != now["class"]:
        return f"its optimizer is {before['class']}, whose state {now['class']} cannot use"
    for old, new in zip(before.get("groups") or (), now.get("groups") or (), strict=False):
        for name in STATEFUL:
            if bool(old.get(name)) != bool(new.get(name)):
                return (
                    f"its optimizer has {name}={old.get(name)}, whose state is not for "
                    f"{name}={new.get(name)}"
                )
    return None


def build_job(settings: Mapping[str, Any]) -> Job:
    """Import the class that `job._target_` names and call it. Raises `JobError`."""
    dotted = str(settings["_target_"])
    module, _, name = dotted.rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise JobError(f"job._target_={dotted}: {error}") from error
    except AttributeError as error:
        raise JobError(f"job._target_={dotted}: {module} has no '{name}'") from error
    if not isinstance(target, type):
        raise JobError(f"job._target_={dotted} must be a class, but is a {type(target).__name__}")
    missing = [
        name
        for name in REQUIRED_METHODS
        if not callable(getattr(target, name, None)) or getattr(target, name) is getattr(Job, name)
    ]
    if missing == ["loss"] and is_coupled(target):
        missing = []
    if missing:
        raise JobError(
            f"job._target_={dotted} is not a job: it has no {' and no '.join(missing)} "
            f"(see docs/tutorial/your-own-job.md)"
        )
    arguments = {key: value for key, value in settings.items() if key != "_target_"}
    try:
        known = inspect.signature(target).parameters.values()
    except ValueError:  # a class implemented in C has none
        return target(**arguments)
    required = {
        p.name: p.default is p.empty
        for p in known
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known)
    refuse_arguments(dotted, arguments, required, takes_any=takes_any)
    return target(**arguments)


def _callbacks_of(job: Job) -> Sequence[Callback]:
    """Return the job's callbacks. Raise `JobError` for anything else."""
    method = getattr(job, "callbacks", list)
    method_name = f"{type(job).__name__}.callbacks"
    if not callable(method):
        raise JobError(
            f"{method_name} must be a method, as in def callbacks(self): return [Losses()]"
        )
    callbacks: Any = method()
    if misuse := describe_misuse(callbacks, f"what {method_name}() returns", "return [Losses()]"):
        raise JobError(misuse)
    return callbacks


def framework_of(job: Job) -> str:
    """Return the framework that the job is written for. Raise `JobError` if there is none."""
    own = getattr(job, "framework", "torch")
    if refusal := FRAMEWORKS.refusal(own):
        raise JobError(refusal.replace(FRAMEWORKS.key, f"{type(job).__name__}.framework", 1))
    return own


def engine_settings(config: Config, job: Job) -> EngineSettings:
    """Return an engine's settings; fields with the same name in both are the same.

    Raises:
        JobError: the job's metric_names are one text.
    """
    names = getattr(job, "metric_names", ())
    if isinstance(names, str):  # its letters would be the names
        raise JobError(
            f"{type(job).__name__}.metric_names must be a list of names, as in [{names!r}], but is "
            f"the text {names!r}"
        )
    own: dict[str, Any] = {
        "optimizer": config.optimizer,
        "metric_names": tuple(names),
        "jit_level": None if config.engine.jit_level == "auto" else config.engine.jit_level,
        "survive": bool(config.run.survive),
    }
    same: dict[str, Any] = {
        setting.name: getattr(section, setting.name)
        for section in (config.train, config.accumulation, config.engine)
        for setting in fields(EngineSettings)
        if hasattr(section, setting.name)
    }
    return EngineSettings(**same | own)


def _planned(config: Config, job: Job, engine: Engine, nodes: int, run: RunDir) -> Plan:
    """Return the plan for the actual model and data set. Collective.

    Raises what `compare_facts` does if they differ from the configured facts.
    """
    rate = base_rate(engine.optimizer_used(), config.schedule.base_lr, type(job).__name__)

    dataset = dataset_of(job)
    shards: Shards | None = getattr(dataset, "shards", None)
    branch = branch_in(run.read_plan())

    augments = bool(getattr(job, "augments", False))
    true_samples = agreed_samples(engine, dataset, augments=augments)
    lengths = None
    if config.accumulation.micro_tokens is not None:
        lengths = agreed_lengths(engine, job, dataset, true_samples)

    # Called twice: with what the model and the data have, and with what the configuration says.
    def plan_with(parameters: int | None, samples: int | None) -> Plan:
        known = JobFacts(
            lengths=lengths if samples == true_samples else None,
            cost=getattr(job, "cost", None),
            shards=shards if samples is not None else None,
            nodes=nodes,
            dataset_samples=samples,
            parameters=parameters,
            metric_count=len(getattr(job, "metric_names", ())),
            framework=framework_of(job),
            extra_collectives=engine.extra_collectives(),
            own_rate=has_own_rate(job),
            base_rate=rate,
            branch=branch,
        )
        return Plan.of(config, known)

    planned = plan_with(engine.parameter_count(), true_samples)
    if planned.work is not None:
        refuse_different_costs(engine, job, planned.work)
    compare_facts(config.facts, planned, plan_with)
    return planned
