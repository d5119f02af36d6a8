"""A rank, from its environment to its exit code: set up, meet the others, train, say how it ended.

`entry.py` calls it: in a fork (local), through the one pickled task (SLURM), or for whoever starts
`python -m orchestrator.rank RUN --attempt N`. All give it SLURM's variables; what differs is in
`attendance`.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from orchestrator.config.frameworks import check_installed, check_tracker
from orchestrator.config.job_source import check_target
from orchestrator.config.reading import read_config
from orchestrator.config.schema import Config
from orchestrator.engine.api import Engine, GroupSpec
from orchestrator.engine.common.waiting import for_others
from orchestrator.engine.framework import Framework
from orchestrator.engine.settings import EngineSettings
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    FENCED_RANK,
    JobError,
    OrchestratorError,
    RunFolderError,
    StopRequested,
)
from orchestrator.extensions import FRAMEWORKS, shadowed
from orchestrator.job import REQUIRED_METHODS, Job, has_own_rate, is_coupled
from orchestrator.lifecycle import checkpoint
from orchestrator.lifecycle.address import interface_variables
from orchestrator.lifecycle.signs.node_watch import FAILED, FENCED, FINISHED, STOPPED
from orchestrator.lifecycle.stopping.stop_signals import StopFlag
from orchestrator.lifecycle.topology import Topology
from orchestrator.plan.parts import Known
from orchestrator.plan.plan import Plan
from orchestrator.rank.agreed.dataset import agreed_samples
from orchestrator.rank.agreed.devices_asked import devices_asked
from orchestrator.rank.agreed.environment import describe_environment
from orchestrator.rank.agreed.rates import own_rates
from orchestrator.rank.agreed.stated_facts import compare_facts
from orchestrator.rank.attendance import Attendance
from orchestrator.rank.failure import exit_code
from orchestrator.rank.loop import Outcome
from orchestrator.rank.preflight import preflight
from orchestrator.rank.survivors import Survivors
from orchestrator.rank.training import Training
from orchestrator.rank.writing.rank_log import send_output_to
from orchestrator.rank.writing.recorder import Recorder
from orchestrator.rank.writing.result import result_of
from orchestrator.report.tables.computed_with import warnings_of
from orchestrator.run_folder.rundir import RunDir, write_json
from orchestrator.run_warnings import warn, warn_into
from orchestrator.snapshot.code_state import code_state, folder_of

LAST_WORDS = {EXIT_FINISHED: FINISHED, EXIT_STOPPED: STOPPED, FENCED_RANK: FENCED}


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
    missing = [method for method in REQUIRED_METHODS if not callable(getattr(target, method, None))]
    if missing == ["loss"] and is_coupled(target):
        missing = []
    if missing:
        raise JobError(f"job._target_={dotted} is not a job: it has no {' and no '.join(missing)}")
    return target(**{key: value for key, value in settings.items() if key != "_target_"})


def framework_of(job: Job, config: Config) -> str:
    """The engine to use. Raises `JobError` when the job was written for another one."""
    own = getattr(job, "framework", "torch")
    asked = config.engine.framework
    if asked not in ("auto", own):
        raise JobError(
            f"engine.framework={asked}, but {type(job).__name__} is written for {own}; "
            f"leave engine.framework out, or choose another job"
        )
    if refusal := FRAMEWORKS.refusal(own):
        raise JobError(refusal.replace(FRAMEWORKS.key, f"{type(job).__name__}.framework", 1))
    return own


def engine_settings(config: Config, job: Job) -> EngineSettings:
    """What of the configuration an engine needs: what has the same name in both is the same."""
    own: dict[str, Any] = {
        "leaf_size": config.accumulation.micro_batch,
        "optimizer": config.optimizer,
        "metric_names": tuple(getattr(job, "metric_names", ())),
        "jit_level": None if config.engine.jit_level == "auto" else config.engine.jit_level,
        "survive": config.run.survive,
    }
    same: dict[str, Any] = {
        setting.name: getattr(section, setting.name)
        for section in (config.train, config.accumulation, config.engine)
        for setting in fields(EngineSettings)
        if hasattr(section, setting.name)
    }
    return EngineSettings(**same | own)


def _group_spec(config: Config, folder: Path, topology: Topology, stop: StopFlag) -> GroupSpec:
    place = ("rank", "size", "local_rank", "node", "address")
    return GroupSpec(
        **{name: getattr(topology, name) for name in place},
        folder=folder,
        transport=config.transport,
        timeout_s=config.cluster.rendezvous_timeout_s,
        collective_timeout_s=config.cluster.collective_timeout_s,
        devices_asked=devices_asked(config.cluster, os.environ, scheduled=topology.scheduled),
        stop_requested=lambda: stop.requested,
    )


def _planned(config: Config, job: Job, engine: Engine, nodes: int) -> Plan:
    """The plan, now that the model and the data set are known; raises what `compare_facts` does
    where the configuration said something else of them. Collective.
    """

    def plan_with(parameters: int | None, samples: int | None) -> Plan:
        known = Known(
            nodes=nodes,
            dataset_samples=samples,
            parameters=parameters,
            metric_count=len(getattr(job, "metric_names", ())),
            framework=framework_of(job, config),
            collectives_beside=engine.collectives_beside(),
            own_rate=has_own_rate(job),
        )
        return Plan.of(config, known)

    planned = plan_with(engine.parameter_count(), agreed_samples(engine, job.dataset()))
    compare_facts(config.facts, planned, plan_with)
    return planned


def _restore(run: RunDir, engine: Engine, outcome: Outcome, rank: int) -> None:
    """Load the newest sound checkpoint, the same on every rank: rank 0 chooses."""
    own = run.identity
    if rank == 0:
        checkpoint.make_again(run.checkpoints)
        checkpoint.remove_partial(run.checkpoints)
    found, passed_over = checkpoint.newest(run.checkpoints, own) if rank == 0 else (None, [])
    for sentence in passed_over:
        warn(sentence)
    if (updates := int(engine.gather([found.updates if found else -1])[0][0])) < 0:
        return
    chosen = found or checkpoint.load(checkpoint.folder_of(run.checkpoints, updates), own)
    engine.load_state(chosen.folder, chosen.extra)
    outcome.updates, outcome.samples = chosen.updates, chosen.samples


def _environment_before(run: RunDir) -> dict[str, Any] | None:
    """What the attempt before computed with; None, and a warning, where that cannot be read."""
    try:
        return run.read_environment()
    except RunFolderError as error:
        warn(f"{error}; so nobody can tell whether this start computes with the same")
        return None


def _write_down(run: RunDir, environment: dict[str, Any], engine: Engine, planned: Plan) -> None:
    """Rank 0's part before training: what it is computed with, the plan, and what to know of it."""
    environment["optimizer"] = engine.optimizer_used()
    changed = [*shadowed(), *warnings_of(environment, _environment_before(run))]
    micro_batches = sum(map(len, planned.split.micro_batches))
    for sentence in (*engine.warnings(micro_batches), *changed, *planned.warnings):
        warn(sentence)
    write_json(run.environment, environment)
    run.write_own(run.plan, planned.to_json())


def _start_ahead(config: Config, spec: GroupSpec) -> None:
    """Let the framework start what takes time before the job is imported, if the job's source says
    which framework that is. Raises `JobError` when it is not installed as it must be, `ConfigError`
    when the tracker's package is not.
    """
    named = check_target(config.job).framework
    check_installed(named)
    check_tracker(config.tracker.kind)
    if named is not None and FRAMEWORKS.refusal(named) is None:
        FRAMEWORKS.make(named, Framework).ahead(spec)


def _run_rank(
    run: RunDir, attempt: int, topology: Topology, stop: StopFlag, attendance: Attendance
) -> Outcome:
    config = read_config(run.existing().read_config())
    attendance.begin(config)
    spec = _group_spec(config, run.attempt(attempt), topology, stop)
    _start_ahead(config, spec)
    job = build_job(config.job)
    framework = FRAMEWORKS.make(framework_of(job, config), Framework)
    with for_others("their group to form"):
        group = framework.form_group(spec)
    engine = framework.build_engine(job, engine_settings(config, job), group)
    preflight(run, attempt, config, topology, engine)
    planned = _planned(config, job, engine, topology.nodes)
    assert planned.updates is not None  # noqa: S101  # the data set is known here
    training = Training(
        run=run, attempt=attempt, config=config, engine=engine, planned=planned,
        rates=own_rates(job, config.schedule, engine, planned.updates), attendance=attendance,
        stop=stop,
    )  # fmt: skip
    _restore(run, engine, outcome := training.outcome, topology.rank)
    checkpoint.refuse_beyond(run, outcome.updates, planned.updates)
    if config.train.initial_weights is not None and not outcome.updates:
        checkpoint.check_initial(run)
        engine.load_weights(run.initial_weights)
    if topology.rank == 0:
        copied = run.submitted_code(attempt) if topology.scheduled and config.run.snapshot else None
        code = copied or code_state(folder_of(type(job)))
        environment = describe_environment(framework.versions(), group.transport, code)
        _write_down(run, environment, engine, planned)
        training.write()
    survivors = None
    if config.run.survive and group.size > 1:
        survivors = Survivors(spec, config.cluster, topology, framework, engine, group)
        attendance.goes_on_with(survivors)
    _train_and_tell(training, survivors, group)
    return outcome


def _train_and_tell(training: Training, survivors: Survivors | None, group: Any) -> None:
    """Train to the end; on whoever is rank 0 then, the result."""
    run, outcome, attendance = training.run, training.outcome, training.attendance
    began = time.perf_counter()
    memory = training.among(survivors, group)
    seconds = time.perf_counter() - began
    if isinstance(training.recorder, Recorder):
        training.recorder.close(finished=outcome.state == "finished")
        attendance.allow_result()
        if outcome.state == "finished" or not attendance.leave(outcome.updates):
            result = result_of(
                run, outcome, training.engine, training.planned, seconds=seconds, memory=memory
            )
            if outcome.state == "stopped" and (why := attendance.why_for_good()):
                result["why"] = why
            run.write_own(run.result, result)
    # Groups that watch their peers are told that what follows is an end, not a loss.
    getattr(group, "close", lambda: None)()


def run_rank(run_path: Path, attempt: int) -> int:
    """Be one rank of the run in `run_path`; give the exit code. Never raises what a job raised."""
    stop = StopFlag().install()
    # MindSpore's C++ prints pages of warnings unless told otherwise before its import.
    os.environ.setdefault("GLOG_v", "3")
    run = RunDir(run_path)
    topology = Topology.from_env(os.environ)
    if topology.scheduled:
        os.environ.update(interface_variables(os.environ, topology.address))
    send_output_to(run.rank_log(topology.rank))
    warn_into(run.warnings(attempt, topology.node_index), topology.rank)
    attendance = Attendance(run, attempt, topology, stop)
    code = EXIT_FAILED
    try:
        code = _train(run, attempt, topology, stop, attendance)
    finally:
        attendance.end(LAST_WORDS.get(code, FAILED))
    return code


def _train(
    run: RunDir, attempt: int, topology: Topology, stop: StopFlag, attendance: Attendance
) -> int:
    """`_run_rank`, and what is to be said of how it ended; gives the exit code."""
    try:
        outcome = _run_rank(run, attempt, topology, stop, attendance)
    except StopRequested:
        if attendance.leads:
            attendance.leave(None)
        return EXIT_STOPPED
    except BaseException as error:  # noqa: BLE001  # whatever ended this rank has to be told to the others
        if attendance.excused(error):
            return EXIT_STOPPED
        if not isinstance(error, OrchestratorError):
            traceback.print_exception(error)
        else:
            print(f"error: {error}", file=sys.stderr)
        attendance.failed(error)
        return exit_code(error)
    return EXIT_FINISHED if outcome.state == "finished" else EXIT_STOPPED
