"""A program's rank: a worker that becomes the user's program by `exec`.

Its agent has the rest: the port where the ranks meet, stops, checks for progress, the program's end
(`agent/programs.py`).
"""

from __future__ import annotations

import glob
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from orchestrator.agent.topology import OUTER_PATH_VARIABLE, OUTER_UMASK_VARIABLE, Topology
from orchestrator.agent.workers import STOP_SIGNALS
from orchestrator.config.job_source import script_of
from orchestrator.config.launchers import ProgramRank, program_style
from orchestrator.config.program import ProgramConfig, program_of, with_newest_files
from orchestrator.config.reading import RUN_FOLDER, read_config, with_run_folder
from orchestrator.engine.common.rendezvous import backoff
from orchestrator.engine.common.waiting import PatientDeadline, for_others
from orchestrator.errors import ClusterError, OrchestratorError, RanksMissing, StopRequested
from orchestrator.rundir.files import read_json, write_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.program_link import ATTEMPT, RANK, RUN, SIGNAL, WARNINGS, WORLD
from orchestrator.rundir.warnings import warn
from orchestrator.snapshot import submitted
from orchestrator.trainer.environment import lacking_devices
from orchestrator.trainer.stop import StopFlag, restart_note
from orchestrator.trainer.worker import WorkerProcess, run_in_worker

log = logging.getLogger(__name__)


def main(path: Path, attempt: int) -> int:
    """Become the program of this rank; return an exit status if that fails."""
    return run_in_worker(path, attempt, _execute)


def _execute(worker: WorkerProcess) -> NoReturn:
    """Execute the program in this process. Raises if it cannot be started, or is to stop before."""
    run, attempt, topology = worker.run, worker.attempt, worker.topology
    config = read_config(run.existing().read_config())
    program, cluster = program_of(config.job), config.cluster
    worker.begin(config)
    if topology.local_rank == 0 and (sentence := lacking_devices(cluster, os.environ)):
        warn(sentence, about="rank")
    enter_submission_directory(run, topology.node)
    if attempt and topology.rank == 0:
        write_json(run.restart(attempt), restart_note(run, attempt, topology, 0))
    rendezvous, style = None, program_style(program.style)
    if style.forms_group:
        with for_others():
            rendezvous = _find_rendezvous(
                run.program_rendezvous(attempt), cluster.rendezvous_timeout_s, worker.stop
            )
    start = ProgramStart(
        program=program,
        topology=topology,
        rendezvous=rendezvous,
        run=run,
        attempt=attempt,
        most_restarts=config.run.max_restarts,
        timeout_s=cluster.rendezvous_timeout_s,
    )
    copied = submitted(os.environ) or {"roots": {}}  # a local run has no copy of the code
    copies = {Path(root): Path(copy) for root, copy in copied["roots"].items()}
    argv = command_line(program, run, copies, attempt)
    log.info("attempt %d: %s", attempt, shlex.join(argv))
    variables = environment(os.environ, start, copies)
    # A shell gives a program these handlers and this umask.
    for number in (*STOP_SIGNALS, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the latter two
        signal.signal(number, signal.SIG_DFL)
    if topology.scheduled and program.stop_signal != "USR2":
        # A scheduler signals all processes of a rank; the program expects its own signal only.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if umask := os.environ.get(OUTER_UMASK_VARIABLE):
        os.umask(int(umask, 8))
    sys.stdout.flush()
    sys.stderr.flush()
    worker.link.become_program(
        stop_signal=program.stop_signal,
        rendezvous=rendezvous,
        serves=topology.rank == 0 and style.forms_group and style.rank_0_listens,
        restarts=worker.restarts,
        log_bytes=run.rank_log(topology.rank).stat().st_size,
    )
    try:
        os.execvpe(argv[0], argv, variables)  # noqa: S606  # a program without a shell is meant
    except OSError as error:
        named = f"{program.target} cannot be started: {error.strerror}"
        raise OrchestratorError(named) from error


def enter_submission_directory(run: RunDir, node: str) -> None:
    """Change to the directory from which the program's relative paths are meant.

    SLURM starts ranks in /tmp where that directory is missing, and a preamble may have left it: a
    file of the same name elsewhere must not start.

    Raises:
        ClusterError: this node cannot enter it.
    """
    home = run.read_submission().get("folder", ".")
    try:
        os.chdir(home)
    except OSError as error:
        raise ClusterError(
            f"the program's relative paths are meant from {home}, where the run was submitted, but "
            f"node {node} cannot enter that folder ({error.strerror}); submit from a folder on a "
            f"shared file system"
        ) from error


class Rendezvous(NamedTuple):
    """Address and port at which the ranks of a program meet."""

    address: str
    port: int


def _find_rendezvous(path: Path, timeout_s: float, stop: StopFlag) -> Rendezvous:
    """Wait until the first node's agent has published where the ranks meet."""
    pauses, deadline = backoff(), PatientDeadline(timeout_s)
    while (published := read_json(path)) is None:
        if stop.requested:
            raise StopRequested("asked to stop before the program began")
        if deadline.passed:
            raise RanksMissing(
                f"the first node did not begin within {timeout_s:g} s "
                "(cluster.rendezvous_timeout_s)"
            )
        time.sleep(next(pauses))
    return Rendezvous(str(published["address"]), int(published["port"]))


# ----------------------------------------------------------------------
# Command line and variables of a program, exactly as the launcher of its style sets them.

HIDDEN = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_GTIDS",
)
HIDDEN_FAMILIES = ("PMI_", "PMIX_", "OMPI_", "MV2_", "MPI_LOCAL", "SUBMITIT_")
OURS = "ORCHESTRATOR_"
DEVICES = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramStart:
    """One start of a rank's program.

    Attributes:
        rendezvous: where the ranks meet; None if they form no group.
        most_restarts: how often the run may begin again.
        timeout_s: for the ranks to meet.
    """

    program: ProgramConfig
    topology: Topology
    rendezvous: Rendezvous | None
    run: RunDir
    attempt: int
    most_restarts: int
    timeout_s: float


def command_line(
    program: ProgramConfig, run: RunDir, copies: Mapping[Path, Path], attempt: int
) -> list[str]:
    """Return the command to execute; a script or module comes from the copy of the code, if any."""
    python = [sys.executable, "-u"]
    arguments = [with_run_folder(argument, str(run.path)) for argument in program.argv]
    if attempt:
        # In a pattern, letters of the folder's name are no pattern.
        pattern = f"{{newest:{RUN_FOLDER}", f"{{newest:{glob.escape(str(run.path))}"
        more = [argument.replace(*pattern) for argument in program.resume_arguments]
        arguments += with_newest_files([with_run_folder(word, str(run.path)) for word in more])
    if program.is_module:
        # Python would begin its path with the working folder, whose files may have been edited.
        own = ["-P"] if copies else []
        return [*python, *own, "-m", program.target, *arguments]
    script = script_of(program)
    if script is None:
        return [program.target, *arguments]
    start = str(in_copy(script, copies))
    return [*(python if script.suffix == ".py" else []), start, *arguments]


def in_copy(path: Path, copies: Mapping[Path, Path]) -> Path:
    """Return a user's path within the copy of the code; the path itself if the copy lacks it."""
    for root, copy in copies.items():
        if path.is_relative_to(root) and (copied := copy / path.relative_to(root)).exists():
            return copied
    return path


def environment(
    env: Mapping[str, str], start: ProgramStart, copies: Mapping[Path, Path]
) -> dict[str, str]:
    """Return all variables of the program, given those of this rank.

    Raises:
        ClusterError: each rank is to see a device of its own, and the node has fewer.
    """
    style, topology = program_style(start.program.style), start.topology
    hide = style.forms_group
    variables = {
        name: value
        for name, value in env.items()
        if not name.startswith(OURS)
        and not (hide and (name in HIDDEN or name.startswith(HIDDEN_FAMILIES)))
    }
    if hide and "SLURM_JOB_ID" in variables:
        variables["SLURM_JOB_NAME"] = "interactive"  # else Lightning trusts SLURM, and requeues
    _search_path(variables, env, start.program, copies)
    _devices(variables, start, style.device_variable)
    set_by_style: dict[str, str] = {}
    if start.rendezvous is not None:
        program_rank = ProgramRank(
            rank=topology.rank,
            size=topology.size,
            local_rank=topology.local_rank,
            local_size=topology.size // topology.nodes,
            node_index=topology.node_index,
            nodes=topology.nodes,
            owns_device=start.program.devices == "rank",
            address=start.rendezvous.address,
            port=start.rendezvous.port,
            timeout_s=start.timeout_s,
            run_id=start.run.identity or start.run.path.name,
            attempt=start.attempt,
            most_restarts=start.most_restarts,
            error_file=start.run.program_error(start.attempt, topology.rank),
        )
        set_by_style = style.variables(program_rank)
    ours = {
        RUN: str(start.run.path),
        ATTEMPT: str(start.attempt),
        RANK: str(topology.rank),
        WORLD: str(topology.size),
        SIGNAL: start.program.stop_signal,
        WARNINGS: str(start.run.warnings(start.attempt, topology.node_index)),
    }
    unless_set = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}  # as torchrun does
    return {**unless_set, **variables, **set_by_style, **ours}


def _search_path(
    variables: dict[str, str],
    env: Mapping[str, str],
    program: ProgramConfig,
    copies: Mapping[Path, Path],
) -> None:
    """Set the user's own PYTHONPATH, within the copies if there are any, without our entries.

    For a module, the folder that holds it comes first, as in Python.
    """
    if OUTER_PATH_VARIABLE not in env:
        return
    outer = [entry for entry in env.get(OUTER_PATH_VARIABLE, "").split(os.pathsep) if entry]
    own = [in_copy(Path(entry).absolute(), copies) for entry in outer]
    if copies and program.is_module:
        own = [in_copy(Path.cwd(), copies), *own]
    variables.pop("PYTHONPATH", None)
    if own:
        variables["PYTHONPATH"] = os.pathsep.join(map(str, own))


def _devices(variables: dict[str, str], start: ProgramStart, default: str) -> None:
    if start.program.devices != "rank":
        return
    local = start.topology.local_rank
    if not any(name in variables for name in DEVICES):
        variables[default] = str(local)
        return
    for name in DEVICES:
        there = [device.strip() for device in variables.get(name, "").split(",") if device.strip()]
        if name in variables and local >= len(there):
            raise ClusterError(
                f"job.devices=rank gives each rank one of its node's devices, but {name} has "
                f"{len(there)} for local rank {local}; ask for more by cluster.gpus_per_node"
            )
        if there:
            variables[name] = there[local]
