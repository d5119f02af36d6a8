"""A plug-in of submitit: its scripts run under our agents, on simulated nodes or on SLURM.

With `ORCHESTRATOR_SUBMITIT=local` (or the name of a cluster's configuration, and overrides after
it) the executor here takes the place of submitit's own for SLURM, so `AutoExecutor(folder)` in an
unmodified script submits runs of ours. Each rank loads and calls the function as submitit does, so
results, logs and `checkpoint()` are where submitit's users look for them:

- `submit` writes the function's pickle, and starts a run of `python -m orchestrator.submitit_plugin
  call FOLDER` on every rank (`call`).
- On SLURM the job's id is SLURM's. Simulated nodes need a process that follows the run, enforces
  the time limit and starts it again after a preemption (`follow`); its pid is the job's id.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, cast

import psutil
from submitit.core.core import InfoWatcher, Job
from submitit.core.utils import DelayedSubmission, FailedSubmissionError, JobPaths
from submitit.slurm.slurm import SlurmExecutor, SlurmJobEnvironment

VARIABLE = "ORCHESTRATOR_SUBMITIT"
"""`local`, or the name of a cluster's configuration; further items are overrides and flags."""
NAME = "orchestrator"
MODULE = "orchestrator.submitit_plugin"
ONE_LOG = "STDERR_TO_STDOUT"  # a variable of the ranks; SUBMITIT_… are refused
RUN = "{}_run"  # the run's folder in the job's, by the job's id
POLL_S = 0.2
STATES = {
    "pending": "PENDING",
    "starting": "RUNNING",
    "running": "RUNNING",
    "ending": "RUNNING",
    "finished": "COMPLETED",
    "failed": "FAILED",
    "cancelled": "CANCELLED",
    "stopped": "CANCELLED",
    "lost": "NODE_FAIL",
}
KEYS = {
    "ntasks_per_node": "ranks_per_node",
    "cpus_per_task": "cpus_per_rank",
    "time": "time_min",
    "signal_delay_s": "signal_ahead_s",
    "setup": "preamble",
    **{
        name: name
        for name in (
            "nodes",
            "gpus_per_node",
            "partition",
            "account",
            "qos",
            "constraint",
            "exclude",
            "exclusive",
        )
    },
}
"""Parameters of submitit's executor for SLURM, and our keys below `cluster`."""
FLAGS = (
    "comment",
    "mem_per_gpu",
    "mem_per_cpu",
    "gres",
    "mail_type",
    "mail_user",
    "nodelist",
    "dependency",
    "wckey",
)
"""Parameters that become flags of sbatch as they are."""
NOT_OURS = {
    "cpus_per_gpu": "cpus_per_task",
    "gpus_per_task": "gpus_per_node, of which each rank uses the one of its local rank",
    "num_gpus": "gpus_per_node",
    "srun_args": f"cluster.srun_flags in {VARIABLE}",
    "teardown": "the function itself",
}
"""Refused parameters, and their replacements."""


UNITS = {"K": 2**-20, "M": 2**-10, "": 2**-10, "G": 1, "T": 2**10}
"""Units of sbatch's --mem, in GiB."""


def _memory_gib(mem: Any) -> float:
    """Return the GiB of a size as sbatch takes it.

    >>> _memory_gib("16G"), _memory_gib("512MB"), _memory_gib(2048)
    (16, 0.5, 2.0)
    """
    size = re.fullmatch(r"(\d*[1-9]\d*)([KMGT]?)B?", str(mem), re.IGNORECASE)
    if size is None:
        raise ValueError(
            f"mem={mem!r} must be the memory of a node, as in mem='16G', or in mem_gb=16"
        )
    return int(size[1]) * UNITS[size[2].upper()]


class Watcher(InfoWatcher):
    """The states of the jobs' runs, by their folders and at most one squeue."""

    def __init__(self) -> None:
        super().__init__(delay_s=15)
        self.runs: dict[str, Path] = {}

    def update(self) -> None:
        from orchestrator.rundir.folder import RunDir
        from orchestrator.runs.status import statuses

        unfinished = {job: self.runs[job] for job in self._registered - self._finished}
        # Asked first: a job that ends meanwhile has its last state when that is read.
        followed = {job for job in unfinished if _is_followed(job)}
        begun = {
            job: RunDir(run) for job, run in unfinished.items() if (run / "config.yaml").exists()
        }
        run_statuses, _ = statuses(begun.values())
        states = {
            job: STATES.get(status.state, "UNKNOWN")
            for job, status in zip(begun, run_statuses, strict=True)
        }
        for job in unfinished:
            state = states.get(job, "FAILED")
            if state != "COMPLETED" and job in followed:
                state = "RUNNING"
            self._info_dict[job] = {"State": state, "jobState": state}
            if self.is_done(job, mode="cache"):
                self._finished.add(job)
        self._last_status_check = time.time()

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        if mode == "standard" and not (self.runs[job_id] / "handle.json").exists():
            mode = "force"  # it runs on this machine: no scheduler is asked
        return super().get_info(job_id, mode)

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode=mode).get("State", "UNKNOWN")


def _is_followed(job_id: str) -> bool:
    """Return True if `follow` is at work on a job on simulated nodes."""
    try:
        process = psutil.Process(int(job_id))
        argv = process.cmdline()
        # A process has no command line for a moment during its exec, which Popen does not wait
        # for. A thread of the kernel never has one, nor an executable: its pid may be the id of a
        # SLURM job.
        return argv[2:4] == [MODULE, "follow"] or (not argv and bool(process.exe()))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _consequence(paths: JobPaths) -> Path:
    """Return where a rank leaves its error if it is the consequence of another rank's end.

    submitit takes a job with a result for done, and this one may start again.
    """
    return paths.result_pickle.with_suffix(".consequence")


class OrchestratorJob(Job[Any]):
    """A submitted function, whose ranks are a run of ours."""

    watcher = Watcher()

    @property
    def run(self) -> Path:
        """The run's folder, for `python -m orchestrator status` and the other verbs."""
        return self.paths.folder / RUN.format(self.job_id)

    def _register_in_watcher(self) -> None:
        self.watcher.runs[self.job_id] = self.run
        self.watcher.register_job(self.job_id)

    def cancel(self, check: bool = True) -> None:
        """End all processes of the job now.

        Args:
            check: raise where there is nothing to end.
        """
        from orchestrator.errors import OrchestratorError
        from orchestrator.rundir.folder import RunDir
        from orchestrator.runs.cancel import cancel

        while True:
            may_begin = _is_followed(self.job_id)
            try:
                cancel(RunDir(self.run), now=True)
            except OrchestratorError:
                if may_begin:
                    time.sleep(POLL_S)
                    continue
                if check:
                    raise
            return

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        self.wait()
        consequence = _consequence(self.paths)
        if consequence.exists() and not self.paths.result_pickle.exists():
            consequence.rename(self.paths.result_pickle)
        return super()._get_outcome_and_result()

    def _interrupt(self, timeout: bool = False) -> None:
        """Preempt the job, as submitit's own tests do. `timeout`: without SIGTERM first."""
        del timeout  # SIGTERM does nothing to submitit's functions
        if _is_followed(self.job_id):
            os.kill(int(self.job_id), signal.SIGUSR2)
        else:
            subprocess.check_call(["scancel", self.job_id, "--signal", "USR2"])


class OrchestratorExecutor(SlurmExecutor):
    """Submit functions as runs of ours. Takes the parameters of submitit's executor for SLURM."""

    job_class = OrchestratorJob

    @classmethod
    def name(cls) -> str:
        return "slurm" if os.environ.get(VARIABLE) else NAME

    @classmethod
    def affinity(cls) -> int:
        return 3 if os.environ.get(VARIABLE) else 0

    def __init__(
        self,
        folder: str | Path,
        max_num_timeout: int = 3,
        max_pickle_size_gb: float = 1.0,
        python: str | None = None,
    ) -> None:
        if python is not None:
            raise ValueError(
                f"python={python!r}: ranks run under {sys.executable}; for a container, put "
                f"cluster.container=… into {VARIABLE}"
            )
        super(SlurmExecutor, self).__init__(folder, max_num_timeout, max_pickle_size_gb)
        self._cluster, *self._options = shlex.split(os.environ.get(VARIABLE) or "local")

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        for name, instead in NOT_OURS.items():
            if kwargs.get(name) is not None:
                raise ValueError(f"{name}={kwargs[name]!r} does not work here; use {instead}")
        if kwargs.get("mem") is not None:
            _memory_gib(kwargs["mem"])
        if kwargs.get("use_srun", True) is not True:
            raise ValueError("use_srun=False does not work here: agents start the ranks")
        if "array_parallelism" in kwargs:
            warnings.warn(
                "array_parallelism has no effect: each function of an array is a job of its own",
                stacklevel=4,
            )
        if kwargs.get("setup") and self._is_local:
            warnings.warn("setup is not run on simulated nodes", stacklevel=4)
        super()._internal_update_parameters(**kwargs)

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[Job[Any]]:
        if "%a" in str(self.folder):
            raise ValueError(
                f"folder={str(self.folder)!r}: %a has no value here, where each function of an "
                f"array is a job of its own; use %j"
            )
        folder = JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        minutes = self._time_limit_min
        pickles = [folder / f"{uuid.uuid4().hex}.pkl" for _ in delayed_submissions]
        size, count = 0.0, len(pickles)
        with contextlib.ExitStack() as on_failure:
            for path in pickles:
                on_failure.callback(path.unlink, missing_ok=True)
            for delayed, path in zip(delayed_submissions, pickles, strict=True):
                delayed.set_timeout(minutes, self.max_num_timeout)
                delayed.dump(path)
                size += path.stat().st_size / 1024**3
                if size > self.max_pickle_size_gb:
                    raise RuntimeError(
                        f"the functions and their arguments have over {self.max_pickle_size_gb} "
                        f"GB; raise max_pickle_size_gb if that is meant"
                    )
            ids = self._follow(count) if self._is_local else self._queue(folder, count)
            on_failure.pop_all()
        ranks = range(self._num_tasks())
        jobs: list[Job[Any]] = []
        for job_id, path in zip(ids, pickles, strict=True):
            jobs.append(self.job_class(folder=self.folder, job_id=job_id, tasks=ranks))
            jobs[-1].paths.move_temporary_file(path, "submitted_pickle")
        return jobs

    def _overrides(self) -> list[str]:
        """Return the command line of a run with this executor's parameters."""
        from orchestrator.config.command_line import quote_for_hydra

        overrides = [f"cluster={self._cluster}", "run.snapshot=false", "run.watch=false"]
        if self.parameters.get("stderr_to_stdout"):
            overrides.append(f"cluster.environment.{ONE_LOG}='1'")
        defaults = {"nodes": 1, "ntasks_per_node": 1, "signal_delay_s": 90, "time": 5}
        parameters: dict[str, Any] = {**defaults, **self.parameters, "time": self._time_limit_min}
        for name, value in parameters.items():
            if value is None or (self._is_local and name not in ("nodes", "ntasks_per_node")):
                continue
            if name in KEYS:
                listed = isinstance(value, list | tuple)
                text = (
                    f"[{','.join(map(quote_for_hydra, value))}]"
                    if listed
                    else quote_for_hydra(str(value))
                )
                bare = isinstance(value, int | bool)
                overrides.append(f"cluster.{KEYS[name]}={value if bare else text}")
            elif name == "mem":
                overrides.append(f"cluster.memory_gib={_memory_gib(value)}")
            elif name in FLAGS:
                flag = name.replace("_", "-")
                overrides.append(f"cluster.slurm_flags.{flag}={quote_for_hydra(str(value))}")
            elif name == "additional_parameters":
                for flag, its in value.items():
                    # true: without a value
                    text = "true" if its is True else quote_for_hydra(str(its))
                    overrides.append(f"cluster.slurm_flags.{flag.replace('_', '-')}={text}")
        if name := self.parameters.get("job_name"):
            overrides.append(f"run.name={quote_for_hydra(name)}")
        return [*overrides, *self._options]

    @property
    def _time_limit_min(self) -> int:
        """The time limit in minutes, also where `slurm_time` is in one of SLURM's forms."""
        from orchestrator.units import time_limit_min

        limit = self.parameters.get("time", 5)
        return time_limit_min(limit, "slurm_time") if isinstance(limit, str) else limit

    @property
    def _is_local(self) -> bool:
        return self._cluster == "local"

    def _follow(self, count: int) -> list[str]:
        """Start the runs on simulated nodes, each with a process that follows it."""
        minutes, ahead_s = self._time_limit_min, self.parameters.get("signal_delay_s", 90)
        limits = [str(minutes * 60), str(min(ahead_s, minutes * 30))]
        command = [sys.executable, "-m", MODULE, "follow", str(self.folder), *limits]
        started = [
            subprocess.Popen(
                [*command, *self._overrides()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # it survives the script, and its Ctrl-C
            )
            for _ in range(count)
        ]
        for process in started:
            threading.Thread(target=process.wait, daemon=True).start()  # no zombie is left
        return [str(process.pid) for process in started]

    def _queue(self, folder: Path, count: int) -> list[str]:
        """Submit the runs to SLURM: all, or none.

        Raises:
            FailedSubmissionError: with the message of `orchestrator launch`.
        """
        runs = [folder / RUN.format(uuid.uuid4().hex) for _ in range(count)]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                MODULE,
                "queue",
                str(self.folder),
                *map(str, runs),
                "--",
                *self._overrides(),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise FailedSubmissionError((done.stderr + done.stdout).strip())
        ids = [str(json.loads((run / "handle.json").read_text())["job_id"]) for run in runs]
        for job_id, run in zip(ids, runs, strict=True):
            link = JobPaths(self.folder, job_id=job_id).folder / RUN.format(job_id)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(run)
            script = JobPaths(self.folder, job_id=job_id).submission_file
            script.symlink_to(run / "submitit" / "000.sh")
        return ids


# ----------------------------------------------------------------------
# The processes that a job consists of.


class OrchestratorJobEnvironment(SlurmJobEnvironment):
    """Rank and node of a function, from SLURM's variables, which our agents set for each rank.

    The agents start the job again, so a requeue only ends the ranks.
    """

    def activated(self) -> bool:
        return os.environ.get("SUBMITIT_EXECUTOR") == NAME

    @classmethod
    def name(cls) -> str:
        return NAME

    @property
    def _saved(self) -> Path:
        """A file that exists once rank 0 has saved the result of `checkpoint()`."""
        attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
        return self.paths.folder / f"{self.job_id}_saved_{attempt}"

    def _requeue(self, countdown: int) -> None:
        del countdown
        self._saved.touch()

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        super()._handle_signals(paths, submission)
        number = self._usr_sig()
        save = signal.getsignal(number)

        def stop(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_IGN)  # SLURM and the agent both send it
            if self.global_rank == 0 and callable(save):
                save(number, frame)
            # The others must not end while rank 0 may still need them in a collective. SLURM would
            # end them at the requeue.
            threading.Thread(target=self._leave_after_rank_0, args=(paths,), daemon=True).start()

        signal.signal(number, stop)

    def leave_if_stopped(self, paths: JobPaths) -> None:
        """End this rank with the others if it was asked to stop; rank 0 does so by itself."""
        if self.global_rank and signal.getsignal(self._usr_sig()) is signal.SIG_IGN:
            self._leave_after_rank_0(paths)

    def _leave_after_rank_0(self, paths: JobPaths) -> None:
        result = JobPaths(paths.folder, job_id=self.job_id, task_id=0).result_pickle
        while not (self._saved.exists() or result.exists()):
            time.sleep(POLL_S)
        os._exit(0)


def call(folder: Path, job_id: str | None) -> None:
    """Call the submitted function on this rank.

    Args:
        job_id: of a job on simulated nodes; SLURM's own otherwise.
    """
    from submitit.core.submission import process_job

    from orchestrator.errors import PEER_LOST, error_text
    from orchestrator.rundir.folder import RunDir
    from orchestrator.rundir.outcome import failure_record, write_failure
    from orchestrator.rundir.program_link import ATTEMPT, RANK
    from orchestrator.rundir.program_link import RUN as RUN_VARIABLE

    os.environ |= {"SUBMITIT_EXECUTOR": NAME, "SUBMITIT_FOLDER": str(folder)}
    if job_id is not None:
        os.environ["SLURM_JOB_ID"] = job_id
    _name_first_node()
    environment = cast("OrchestratorJobEnvironment", OrchestratorJobEnvironment())
    paths = environment.paths
    paths.folder.mkdir(parents=True, exist_ok=True)  # where SLURM was faster than the script
    _consequence(paths).unlink(missing_ok=True)  # of the start before
    log = os.fdopen(os.dup(2), "w", buffering=1)  # the rank's own, of which a failure's cause comes
    log.write(f"output: {paths.stdout}, {paths.stderr}\n")
    is_single_log = ONE_LOG in os.environ
    for path, standard in ((paths.stdout, 1), (paths.stdout if is_single_log else paths.stderr, 2)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, standard)
        os.close(descriptor)
    try:
        process_job(folder)
    except Exception as error:
        run, attempt = RunDir(Path(os.environ[RUN_VARIABLE])), int(os.environ[ATTEMPT])
        secondary = PEER_LOST.search(error_text(error)) is not None
        if secondary:
            with contextlib.suppress(FileNotFoundError):  # an error that cannot be pickled
                paths.result_pickle.replace(_consequence(paths))
            environment.leave_if_stopped(paths)
        else:
            run.cancel.touch()  # it is over: it must not be requeued
        # Its agent would count an end after a stop signal as a stop, and it has failed.
        cause = f"{type(error).__name__}: {error_text(error)}".partition("\n")[0]
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        failure = failure_record(int(os.environ[RANK]), node, cause, secondary=secondary)
        write_failure(run, attempt, failure)
        traceback.print_exc(file=log)
        raise


def _name_first_node() -> None:
    """Replace the first node's name by its address where the name does not resolve.

    Functions give it to torch as MASTER_ADDR. Simulated nodes have no names that resolve. Their
    first agent may begin later than this rank.
    """
    from orchestrator.agent.node_spec import agent_file
    from orchestrator.rundir.folder import RunDir
    from orchestrator.rundir.program_link import ATTEMPT
    from orchestrator.rundir.program_link import RUN as RUN_VARIABLE

    first, *others = OrchestratorJobEnvironment().hostnames
    try:
        socket.getaddrinfo(first, None)
    except socket.gaierror:
        run, attempt = RunDir(Path(os.environ[RUN_VARIABLE])), int(os.environ[ATTEMPT])
        deadline = time.monotonic() + 60  # for that agent to say its address
        while (agent := agent_file(run, attempt, 0)) is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if agent is not None:
            os.environ["SLURM_JOB_NODELIST"] = ",".join([agent.address, *others])


def follow(folder: Path, limit_s: float, ahead_s: float, arguments: Sequence[str]) -> int:
    """Run a job on simulated nodes to its end; start it again after each preemption.

    Args:
        limit_s: of the job's time, `ahead_s` before which it is preempted.
    """
    from rich.console import Console

    from orchestrator.errors import EXIT_STOPPED
    from orchestrator.launch import main as launch
    from orchestrator.runs.follow import OutputOptions, start_run
    from orchestrator.runs.resume import prepared_resume

    job_id, preempted = str(os.getpid()), False
    paths = JobPaths(folder, job_id=job_id, task_id=0)
    paths.folder.mkdir(parents=True, exist_ok=True)
    run = paths.folder / RUN.format(job_id)
    with paths.stderr.open("ab") as log:  # why a run failed, or could not begin
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    def preempt(*_: object) -> None:
        nonlocal preempted
        preempted = True
        signal.alarm(max(1, round(ahead_s)))
        os.kill(os.getpid(), signal.SIGTERM)  # a second time: every process is ended at once

    signal.signal(signal.SIGUSR2, preempt)
    signal.signal(signal.SIGALRM, preempt)
    signal.alarm(max(1, round(limit_s - ahead_s)))
    program = ["-m", MODULE, "call", str(folder), job_id]
    code = launch(["-q", *arguments, *_of_run(run), "--", *program])
    while code == EXIT_STOPPED and preempted and not paths.result_pickle.exists():
        preempted = False
        signal.alarm(max(1, round(limit_s - ahead_s)))
        with prepared_resume(
            run, OutputOptions(console=Console(), quiet=True), changed=True
        ) as ready:
            code = start_run(ready) if ready else 0
    return code


def queue(folder: Path, runs: Sequence[Path], arguments: Sequence[str]) -> int:
    """Submit runs to SLURM; if one is refused, cancel those before it."""
    from orchestrator.errors import OrchestratorError
    from orchestrator.launch import main as launch
    from orchestrator.report.terminal import print_error
    from orchestrator.rundir.folder import RunDir
    from orchestrator.runs.cancel import cancel

    for number, run in enumerate(runs):
        line = ["-q", *arguments, *_of_run(run), "--", "-m", MODULE, "call", str(folder)]
        if code := launch(line):
            for queued in runs[:number]:
                try:
                    cancel(RunDir(queued), now=True)
                except OrchestratorError as error:  # the others are cancelled all the same
                    print_error(error)
            return code
    return 0


def _of_run(run: Path) -> list[str]:
    from orchestrator.config.command_line import quote_for_hydra

    return [f"run.dir={quote_for_hydra(str(run))}", "job.style=plain", "job.stop_signal=USR2"]


def main(arguments: Sequence[str]) -> int:
    """Run one process of a job; see `call`, `follow` and `queue`."""
    role, folder, *rest = arguments
    if role == "call":
        call(Path(folder), *(rest or [None]))
        return 0
    if role == "follow":
        limit_s, ahead_s, *line = rest
        return follow(Path(folder), float(limit_s), float(ahead_s), line)
    dashes = rest.index("--")
    return queue(Path(folder), list(map(Path, rest[:dashes])), rest[dashes + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
