"""The agents' parent: it imports what workers need, forks agents, and restarts a killed agent.

`python -m orchestrator.agent.local_nodes RUN` with an order on standard input is the parent of all
simulated nodes of this machine. All processes below it end with the launcher: the agents see the
launcher's pipe close, and the kernel kills each process whose parent has ended. Elsewhere each
node has its own parent (`node.py`). An agent is restarted only where workers may be replaced.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.agent.agent import Agent
from orchestrator.agent.judge import IdleTimer, Work
from orchestrator.agent.liveness import AwakeClock
from orchestrator.agent.node_spec import NodeSpec
from orchestrator.agent.processes import (
    adopt_orphans,
    exit_with,
    fork_session,
    leave,
    name_process,
    set_parent_death_signal,
    wait_readable,
)
from orchestrator.agent.rank_log import send_output_to
from orchestrator.agent.workers import STOP_SIGNALS, BecomeWorker, end_descendants
from orchestrator.config.job_source import check_target
from orchestrator.config.program import is_program
from orchestrator.config.reading import read_config
from orchestrator.engine.api import Framework
from orchestrator.errors import START_AGAIN, OrchestratorError
from orchestrator.plugins import FRAMEWORKS
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.warnings import warn_of

# By name, since a trainer imports the agent's modules. Each has `main(run, attempt)`.
PROGRAM, TRAINER = "orchestrator.trainer.program", "orchestrator.trainer.main"
REST_S = 0.3
"""From an agent's end to its next process: the others notice first."""
END_S = 3.0
"""For agents to end by themselves, once the outcome is written or the launcher is gone: longer than
`workers.LINGER_S`."""
POLL_S = 0.1
EXIT_IMPORT_HANGS = 120
IMPORT_HANGS = (
    "in the import of the framework nothing has moved for {} s (cluster.hang_timeout_s); the "
    "node's log has its stack"
)


class NodeProcesses:
    """The agents of some nodes, as seen by their parent.

    Args:
        agent_of: returns a node's agent, in the process that will run it.
        control: a pipe that closes when the launcher ends, after which all processes end; None
            where a scheduler does that.

    Attributes:
        status: 0; that of an agent, as in a shell, once one was killed or failed, and is not
            restarted.
    """

    def __init__(
        self,
        specs: Sequence[NodeSpec],
        environments: Sequence[Mapping[str, str]],
        agent_of: Callable[[NodeSpec], Agent],
        control: int | None = None,
    ) -> None:
        self._specs, self._environments = list(specs), environments
        self._agent_of, self._control = agent_of, control
        self._run = RunDir(self._specs[0].run)
        self._replacements_left = self._specs[0].replacements
        self._pids: dict[int, int] = {}  # of running agents: pid -> index in the list
        self._restart_at: dict[int, float] = {}  # when to restart an agent
        self._signals: list[int] = []  # stop signals that are not yet forwarded
        self._stop: int | None = None  # the newest one that is
        self.status = 0

    def run(self) -> int:
        """Run this process, or the agent or worker that it becomes; return the exit status."""
        job = import_framework(self._run, self._specs[0])
        rank = self.serve()
        if rank is None:
            return self.status
        name_process(f"rank {rank}")
        reseed_generators()
        worker = importlib.import_module(PROGRAM if is_program(job) else TRAINER)
        return worker.main(self._run.path, self._specs[0].attempt)

    def serve(self) -> int | None:
        """Run agents until all have ended. Return the rank in a worker's process."""
        adopt_orphans()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, _: self._signals.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        wake, woken = os.pipe()
        for end in (wake, woken):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(woken)
        for index in range(len(self._specs)):
            rank = self._start(index)
            if rank is not None:
                return rank
        kill_at: float | None = None
        outcome = self._run.outcome(self._specs[0].attempt)
        watched = [wake] if self._control is None else [wake, self._control]
        while self._pids or self._restart_at:
            ready = wait_readable(watched, POLL_S)
            if wake in ready:
                os.read(wake, 4096)
            while self._signals:  # agents alone act on them
                self._stop = self._signals.pop(0)
                for pid in self._pids:
                    os.kill(pid, self._stop)  # not reaped, so the pid is its own
            now = time.monotonic()
            if self._control is None:  # its scheduler ends what remains
                pass
            elif kill_at is None and (self._control in ready or os.path.lexists(outcome)):
                kill_at = now + END_S
                self._restart_at.clear()
                watched = [wake]
            self._reap(now, restart=kill_at is None)
            for index in [index for index, at in self._restart_at.items() if now >= at]:
                del self._restart_at[index]
                rank = self._start(index)
                if rank is not None:
                    return rank
            if kill_at is not None and now >= kill_at:
                for pid in self._pids:
                    os.kill(pid, signal.SIGKILL)  # not reaped, so the pid is its own
        end_descendants()  # what a killed agent's workers had started
        return None

    def _start(self, index: int) -> int | None:
        """Fork an agent. Return the rank in a worker's process."""
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the agent unblocks its own
        pid = fork_session()
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            self._pids[pid] = index
            if self._stop is not None:
                os.kill(pid, self._stop)
            return None
        signal.set_wakeup_fd(-1)
        spec = self._specs[index]
        send_output_to(spec.log_of(spec.index), spec.name)
        os.environ.update(self._environments[index])
        name_process(spec.name)
        try:
            again = self._agent_of(spec).serve()
        except BecomeWorker as worker:
            return worker.rank
        return leave(START_AGAIN if again else 0)

    def _reap(self, now: float, *, restart: bool) -> None:
        """Collect ended agents; with `restart`, restart those that were killed or failed, or ask
        for that.
        """
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            index = self._pids.pop(pid, None)
            code = os.waitstatus_to_exitcode(status)
            if index is None or code == 0 or not restart:
                continue
            if self._replacements_left <= 0 or self._stop is not None:
                if code != START_AGAIN:  # the others continue, which is no failure
                    # As a shell says it: the scheduler's record then tells a kill from a failure.
                    self.status = code if code > 0 else 128 - code
                continue
            self._replacements_left -= 1
            self._specs[index] = self._specs[index].next_incarnation()
            self._restart_at[index] = now + REST_S


def import_framework(run: RunDir, spec: NodeSpec) -> Mapping[str, Any]:
    """Import what workers need; return the job, {} if it cannot be read. If nothing of it moves,
    warn with the stack in the node's log, and exit after `spec.hang_s`.
    """
    job: Mapping[str, Any] = {}
    done = threading.Event()
    idle, clock = IdleTimer(), AwakeClock()

    def watch_import() -> None:
        warned = False
        while not done.wait(1.0):
            idle_s = idle.idle_s(clock(), Work.of_main_thread())
            if idle_s > spec.limits.notice_s and not warned:
                warned = True
                faulthandler.dump_traceback(all_threads=True)
                sentence = (
                    f"nothing has moved for {idle_s:.0f} s in the import of the framework on "
                    f"{spec.name}, a slow disk, say; logs/{spec.log_of(spec.index).name} has its "
                    "stack"
                )
                warn_of(run.warnings(spec.attempt, spec.index), 0, sentence)
            if idle_s > spec.hang_s:
                faulthandler.dump_traceback(all_threads=True)
                message = IMPORT_HANGS.format(f"{spec.hang_s:g}")
                print(f"error: {message}", file=sys.stderr, flush=True)
                os._exit(EXIT_IMPORT_HANGS)

    watch = threading.Thread(target=watch_import, name="import", daemon=True)
    watch.start()
    try:
        job = read_config(run.existing().read_config()).job
    except OrchestratorError:  # each worker reads the same, and reports it in the rank's log
        traceback.print_exc()
    else:
        import_for(job)
    done.set()
    watch.join()  # a fork must not run with another thread alive
    return job


def import_for(job: Mapping[str, Any]) -> None:
    """Import what workers need, with the engine if the job's source names its framework.

    An import that fails here fails in each worker again, which reports it in the rank's log.
    """
    gc.disable()  # imports leave no garbage; collection would take a tenth of their time
    try:
        if is_program(job):
            importlib.import_module(PROGRAM)
            return
        importlib.import_module(TRAINER)
        framework = check_target(job["_target_"]).framework
        if framework is not None:
            FRAMEWORKS.load(framework, Framework)
    except Exception:  # noqa: BLE001  # see above; this is the node's log
        traceback.print_exc()
    finally:
        gc.enable()
    gc.freeze()  # imported objects are no garbage; collecting them would copy their pages


def reseed_generators() -> None:
    """Seed NumPy's and torch's generators anew, so that no two forks draw the same numbers.

    Python's own generator is reseeded in a fork.
    """
    modules: dict[str, Any] = dict(sys.modules)
    if "numpy" in modules:
        modules["numpy"].random.seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()


def spawn_nodes(
    run: Path, environment: Mapping[str, str], standard: Sequence[int], keep: Collection[int]
) -> int:
    """Start the parent of a run's nodes; return its pid. It has a session of its own, so Ctrl-C in
    the terminal reaches the launcher alone.

    Args:
        standard: descriptors that become its standard input, output and error.
        keep: descriptors that it has under the same numbers.
    """
    for descriptor in keep:
        os.set_inheritable(descriptor, True)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "orchestrator.agent.local_nodes", str(run)],
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, own, number) for number, own in enumerate(standard)],
        setsid=True,
    )


# ------------------------------------------------------------------ Without a new interpreter
# A sweep's launcher imports the framework once, and the parents of its points' nodes are forks of
# it: the import takes more than a second, each time.

_imported_with: dict[str, str] | None = None
"""The environment of requests whose nodes may be forks of this process."""


def import_ahead(job: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Import what the nodes of coming runs need, unless it is too late to choose their threads.

    Args:
        environment: of their requests; libraries read the number of threads when they are loaded.
    """
    global _imported_with  # noqa: PLW0603  # as what is imported, it is of the process
    if not {"numpy", "torch"}.isdisjoint(sys.modules):
        return
    os.environ.update(environment)
    import_for(job)
    _imported_with = dict(environment)


def may_fork(environment: Mapping[str, str]) -> bool:
    """Return whether the parent of a run's nodes may be a fork of this process."""
    return environment == _imported_with and threading.active_count() == 1


def become(environment: Mapping[str, str], standard: Sequence[int], keep: Collection[int]) -> int:
    """Be in a fork what `spawn_nodes` starts; return the exit status."""
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if number not in {0, 1, 2, nothing, *keep}:
            # Closed, it might be reused, and a Python object of the launcher would close that.
            with contextlib.suppress(OSError):  # the listing's own
                os.dup2(nothing, number, inheritable=False)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, "rb", closefd=False)  # noqa: SIM115  # a descriptor
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )
    return _run()


def _run() -> int:
    """Run the parent, or the agent or worker that it becomes; return the exit status."""
    order = json.load(sys.stdin)
    set_parent_death_signal(order["launcher"], signal.SIGTERM)  # for the import
    control, report = int(order["control"]), int(order["report"])
    nodes = NodeProcesses(
        [NodeSpec.from_json(node["spec"]) for node in order["nodes"]],
        [node["environment"] for node in order["nodes"]],
        lambda spec: Agent(spec, control, report),
        control,
    )
    return nodes.run()


if __name__ == "__main__":
    exit_with(_run)
