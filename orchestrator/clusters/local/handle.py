"""The launcher's handle of a local run, which starts its nodes.

It needs the agent, which planning and checking a run do not.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from functools import partial

from orchestrator.agent.local_nodes import (
    EXIT_IMPORT_HANGS,
    IMPORT_HANGS,
    become,
    may_fork,
    spawn_nodes,
)
from orchestrator.agent.node_spec import NodeSpec
from orchestrator.agent.processes import fork, wait_readable
from orchestrator.agent.root_cause import tail
from orchestrator.clusters.api import Culprit, Handle, Request, State
from orchestrator.clusters.local.environment import build_environment, node_address
from orchestrator.config.schema import Config
from orchestrator.errors import describe_status
from orchestrator.rundir.files import APPENDING, open_nofollow
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import outcome_from_json, read_outcome

END_S = 10.0
OUTCOME_BYTES = 1 << 20


class LocalHandle(Handle):
    """The launcher's handle of a local run on simulated nodes.

    One child, the parent of all agents (`agent/local_nodes.py`), starts with the nodes'
    environments. The agents decide how the attempt continues, and write how it ended.
    """

    def __init__(self, request: Request, config: Config, *, survive: bool) -> None:
        self._request, self._run = request, RunDir(request.run)
        self._folder = self._run.attempt(request.attempt)
        self._state, self._stopping = State.RUNNING, False
        control, self._control = os.pipe()
        self._report, report = os.pipe()  # receives the outcome even if the disk is full
        os.set_blocking(self._report, False)
        self._hang_s = config.cluster.hang_timeout_s
        names = tuple(f"node{number}" for number in range(request.nodes))
        nodes = [
            {
                "spec": NodeSpec.of(
                    config,
                    request.run,
                    request.attempt,
                    survive=survive,
                    bind=False,
                    index=index,
                    names=names,
                    address=node_address(index),
                ).to_json(),
                "environment": build_environment(request, index, names),
            }
            for index in range(request.nodes)
        ]
        order = {"launcher": os.getpid(), "control": control, "report": report, "nodes": nodes}
        environment = nodes[0]["environment"]
        stdin, pipe = os.pipe()
        log = open_nofollow(self._run.node_log("node0"), APPENDING)
        standard, keep = (stdin, log, log), (control, report)
        if may_fork(request.environment):
            self._pid = fork(partial(become, environment, standard, keep))
        else:
            self._pid = spawn_nodes(request.run, environment, standard, keep)
        for descriptor in (stdin, log, control, report):
            os.close(descriptor)
        self._ended = os.pidfd_open(self._pid)
        self._code: int | None = None  # of the child, once it has ended
        self._reported = b""  # its outcome, where the disk was full
        try:
            with os.fdopen(pipe, "wb") as file:
                file.write(json.dumps(order).encode())
        except BrokenPipeError:  # it has ended already, which `poll` finds
            pass

    def poll(self, timeout_s: float) -> State:
        if self._state.ended:
            return self._state
        if self._code is not None or wait_readable([self._ended], timeout_s):
            self._finish()
        return self._state

    @property
    def _has_begun(self) -> bool:
        return (self._folder / "agent-00000.json").exists()

    def stop(self) -> None:
        self._stopping = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Close the control pipe, on which every agent ends all its processes."""
        self._close_control()
        self._signal(signal.SIGCONT)  # a stopped agent does not see the pipe close
        if not self._has_begun:  # it still imports, and reads no pipe
            self._signal(signal.SIGKILL)
        if self.poll(END_S) is State.RUNNING:
            self._signal(signal.SIGKILL)  # agents die with it, and workers with them
            self._finish()

    def _signal(self, number: int) -> None:
        if self._code is None:
            signal.pidfd_send_signal(self._ended, number)

    def _close_control(self) -> None:
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def _finish(self) -> None:
        if self._code is None:
            self._code = self._reap()
        # Nothing of what follows changes if the folder cannot be read now, and `poll` is repeated.
        outcome = read_outcome(self._run, self._request.attempt)
        if outcome is None and self._reported:
            outcome = outcome_from_json(json.loads(self._reported))
        if outcome is None and self._stopping and not self._has_begun:
            self._state = State.STOPPED  # in the import, before there was an agent
        elif outcome is None:
            cause = "the agents of all nodes ended without an outcome; their parent "
            cause += describe_status(self._code)
            if self._code == EXIT_IMPORT_HANGS:
                cause = IMPORT_HANGS.format(f"{self._hang_s:g}")
            log = tail(self._run.node_log("node0"))
            self.culprit = Culprit(rank=None, node="node0", cause=cause, log_tail=log)
            self._state = State.FAILED
        else:
            self._state, self.culprit = outcome.state, outcome.culprit

    def _reap(self) -> int:
        """Wait for the child's end, take the outcome that it reported; return its exit code."""
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        os.close(self._ended)
        self._close_control()
        with contextlib.suppress(BlockingIOError):  # an agent still holds it
            self._reported = os.read(self._report, OUTCOME_BYTES)
        os.close(self._report)
        return code
