"""Setup of a rank: its job, group, engine and plan, and the checkpoint that it starts from."""

from __future__ import annotations

import os
import shlex
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from orchestrator.agent.topology import interface_variables
from orchestrator.client.checkpoint_manager import CheckpointManager
from orchestrator.client.loop import Callback, configured_callbacks, describe_misuse
from orchestrator.client.run import current_run
from orchestrator.config.job_source import check_target
from orchestrator.config.optimizer import base_rate
from orchestrator.config.reading import read_config, with_run_folder
from orchestrator.config.rules import callback_names, refuse_unsupported, with_survival
from orchestrator.config.schema import Config
from orchestrator.engine.api import Engine, EngineSettings, Framework, Group, GroupSpec
from orchestrator.engine.common.job_checks import warn_of_names
from orchestrator.engine.common.waiting import LONGEST_WAIT_S, declared, for_others
from orchestrator.errors import ConfigError, Evicted, JobError, OrchestratorError, RunFolderError
from orchestrator.job import Job, dataset_of, evaluates, has_own_rate, is_coupled
from orchestrator.machine import visible_gpus
from orchestrator.plan.order import Shards
from orchestrator.plan.parts import JobFacts, branch_in
from orchestrator.plan.plan import Plan
from orchestrator.plan.plan_warnings import balance_text
from orchestrator.plan.recorded_speeds import kept_speeds
from orchestrator.plugins import FRAMEWORKS
from orchestrator.rundir import checkpoints as checkpoint
from orchestrator.rundir.checkpoints import split_reference
from orchestrator.rundir.environments import describe_environment, warnings_of
from orchestrator.rundir.files import write_json
from orchestrator.rundir.folder import BRANCH, RunDir
from orchestrator.rundir.warnings import warn
from orchestrator.snapshot import submitted
from orchestrator.source.git import code_state
from orchestrator.source.modules import folder_of
from orchestrator.trainer.environment import device_request
from orchestrator.trainer.evaluation import agreed_held_out
from orchestrator.trainer.failure import describe
from orchestrator.trainer.job_class import build_job, framework_of
from orchestrator.trainer.recorder import check_tracker
from orchestrator.trainer.same_inputs import (
    agreed_lengths,
    agreed_samples,
    agreed_survival,
    compare_facts,
    own_rates,
    refuse_different_costs,
)
from orchestrator.trainer.survival import GroupMembership
from orchestrator.trainer.training import Training
from orchestrator.trainer.worker import WorkerProcess
from orchestrator.units import plural


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
    # A replacement builds its engine alone, while the others train on.
    group = _form_group(replace(spec, rank=0, size=1) if is_replacement else spec, framework)
    if is_replacement:
        # Not agreed with the others: it starts only where they survive.
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
    refuse_unsupported(config, name, coupled=is_coupled(job))  # its source may not say
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
    checkpoints = CheckpointManager(
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
    micro_batches = sum(map(len, planned.split.micro_batches))
    changed = warnings_of(environment, run)
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
    if resumes and resumes[-1].get("accepts_changes"):  # `resume --changed`
        return
    setting = shlex.quote(f"train.initial_weights={run.path}")
    instead = (
        f"bring it back, continue with it by `resume` with --changed, or start another run with "
        f"{setting}"
    )
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
