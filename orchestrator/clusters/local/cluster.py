"""The local cluster: simulated nodes on this machine, each with its name and its loopback address.

Every worker is a real process with the environment that SLURM would give it, so a job that runs
here runs there. Each node has its agent (`orchestrator.agent`). No process outlives the launcher.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

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
from orchestrator.clusters.api import Admission, Cluster, Culprit, Handle, Request, Share, State
from orchestrator.clusters.machine import (
    cores,
    free_memory_bytes,
    gpu_variable,
    share_gpu_over_nccl,
    share_gpus,
    visible_gpus,
)
from orchestrator.config.program import is_program
from orchestrator.config.rules import planned_survival
from orchestrator.config.schema import Config, node_range
from orchestrator.errors import ClusterError, TransportError, describe_status
from orchestrator.rundir.files import APPENDING, open_nofollow
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import outcome_from_json, read_outcome
from orchestrator.units import format_bytes, plural

END_S = 10.0
OUTCOME_BYTES = 1 << 20
ON_CPUS = ("gloo", "mccl")
NODES_LIMIT = 254 * 254
CROWD = 8  # ranks on a core, beyond which a machine may no longer respond
LEAST_RANK_BYTES = 100 << 20
"""Private memory that a rank of a framework needs at least: 54 MiB were measured for a small model
on torch, without the activations and connections of a larger run.
"""


def node_address(index: int) -> str:
    """Return the loopback address of a simulated node.

    >>> node_address(0), node_address(253), node_address(254)
    ('127.0.1.1', '127.0.1.254', '127.0.2.1')
    """
    return f"127.0.{1 + index // 254}.{1 + index % 254}"


def find_shared_gpus(request: Request) -> list[str]:
    """Return the GPUs that are given to more than one node."""
    assignments = [gpu for gpus in request.details["gpus"] or () for gpu in gpus]
    return sorted({gpu for gpu in assignments if assignments.count(gpu) > 1})


def build_environment(request: Request, index: int, names: Sequence[str]) -> dict[str, str]:
    """Return the environment of a simulated node's agent, which its workers inherit."""
    environment = request.node_environment(index, names, node_address(index))
    gpus = request.details["gpus"]
    if gpus is not None:
        environment[gpu_variable(os.environ)] = ",".join(gpus[index])
    if find_shared_gpus(request):
        environment = {**share_gpu_over_nccl(names[index]), **environment}
    return environment


def _fewer(request: Request, ranks: int) -> str:
    """Return the overrides for the shape nearest to a request's that has at most so many ranks.

    >>> _fewer(Request(run=Path(), attempt=0, nodes=3, ranks_per_node=100), 16)
    'cluster.ranks_per_node=5'
    >>> _fewer(Request(run=Path(), attempt=0, nodes=30, ranks_per_node=8), 16)
    'cluster.nodes=16 cluster.ranks_per_node=1'
    """
    if ranks >= request.nodes:
        return f"cluster.ranks_per_node={ranks // request.nodes}"
    return f"cluster.nodes={max(1, ranks)} cluster.ranks_per_node=1"


def _refuse_beyond_memory(request: Request) -> None:
    free, needed = free_memory_bytes(), request.ranks * LEAST_RANK_BYTES
    if request.ranks > 1 and needed > free:
        raise ClusterError(
            f"cluster.nodes={request.nodes} cluster.ranks_per_node={request.ranks_per_node}: "
            f"{request.ranks} ranks need {format_bytes(needed)} of memory at least "
            f"({format_bytes(LEAST_RANK_BYTES)} each), but this machine has {format_bytes(free)} "
            f"free; try {_fewer(request, free // LEAST_RANK_BYTES)}"
        )


def _crowding_warning(request: Request) -> str | None:
    core_count = cores()
    if request.ranks <= CROWD * core_count:
        return None
    return (
        f"{request.ranks} ranks on {plural(core_count, 'core')}: this machine may stop responding; "
        f"start fewer ({_fewer(request, CROWD * core_count)}), or only look: "
        f"python -m orchestrator plan"
    )


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
        try:
            with os.fdopen(pipe, "wb") as file:
                file.write(json.dumps(order).encode())
        except BrokenPipeError:  # it has ended already, which `poll` finds
            pass

    def poll(self, timeout_s: float) -> State:
        if self._state.ended:
            return self._state
        if wait_readable([self._ended], timeout_s):
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
        if not self._state.ended:
            signal.pidfd_send_signal(self._ended, number)

    def _close_control(self) -> None:
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def _finish(self) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        os.close(self._ended)
        self._close_control()
        try:
            reported = os.read(self._report, OUTCOME_BYTES)
        except BlockingIOError:  # an agent still holds it
            reported = b""
        os.close(self._report)
        outcome = read_outcome(self._run, self._request.attempt)
        if outcome is None and reported:
            outcome = outcome_from_json(json.loads(reported))
        if outcome is None and self._stopping and not self._has_begun:
            self._state = State.STOPPED  # in the import, before there was an agent
        elif outcome is None:
            self._state = State.FAILED
            cause = "the agents of all nodes ended without an outcome; their parent "
            cause += describe_status(code)
            if code == EXIT_IMPORT_HANGS:
                cause = IMPORT_HANGS.format(f"{self._hang_s:g}")
            log = tail(self._run.node_log("node0"))
            self.culprit = Culprit(rank=None, node="node0", cause=cause, log_tail=log)
        else:
            self._state, self.culprit = outcome.state, outcome.culprit


class LocalCluster(Cluster):
    """Simulated nodes on this machine."""

    def refuse(self, framework: str | None) -> None:
        """Refuse a run that this machine cannot run.

        Raises:
            TransportError: there are too few GPUs.
        """
        gpus, width = len(visible_gpus(os.environ)), self.config.cluster.ranks_per_node
        if self.config.transport == "nccl" and gpus < width:
            on_cpus = "mccl" if framework == "mindspore" else "gloo"
            raise TransportError(
                f"transport=nccl needs a GPU for each of the {width} ranks of a node, but this "
                f"machine has {gpus}; try transport={on_cpus}"
            )

    def request(self, run: Path, attempt: int) -> Request:
        request = super().request(run, attempt)
        if request.nodes > NODES_LIMIT:
            raise ClusterError(
                f"cluster.nodes={request.nodes}: a local cluster has at most {NODES_LIMIT}"
            )
        gpus = share_gpus(
            visible_gpus(os.environ),
            request.nodes,
            request.ranks_per_node,
            common=self.config.transport == "nccl",
        )
        return replace(request, details={"gpus": gpus})

    def check(self, request: Request) -> Admission:
        """Warn of crowded cores, and of GPUs that stay unused or are shared.

        Raises:
            ClusterError: the ranks need more memory than this machine has.
        """
        if self._uses_framework:
            _refuse_beyond_memory(request)
        warnings = (_crowding_warning(request), self._gpu_warning(request))
        return Admission(warnings=tuple(filter(None, warnings)))

    @property
    def survival_line(self) -> str:
        cluster, config = self.config.cluster, self.config
        nodes = node_range(cluster.nodes)[1]
        gpus = share_gpus(visible_gpus(os.environ), nodes, cluster.ranks_per_node)
        if config.transport == "auto" and any(gpus or ()):
            config = replace(config, transport="nccl")  # as the ranks will find it
        return planned_survival(config).line

    @property
    def _uses_framework(self) -> bool:
        return not is_program(self.config.job) or self.config.job.get("style") != "plain"

    def _gpu_warning(self, request: Request) -> str | None:
        if shared := find_shared_gpus(request):
            named = f"GPU {shared[0]}" if len(shared) == 1 else f"GPUs {', '.join(shared)}"
            return f"nodes share {named}, and NCCL sends over loopback: slow, for tests"
        gpus = request.details["gpus"]
        if not gpus or any(gpus) or self.config.transport in ON_CPUS:
            return None
        count, ranks = len(visible_gpus(os.environ)), request.ranks
        unused, them = ("its GPU stays", "it") if count == 1 else (f"its {count} GPUs stay", "them")
        return (
            f"this machine has too few GPUs for one each of the {ranks} ranks, so {unused} unused: "
            f"cluster.nodes=1 cluster.ranks_per_node={count} uses {them}, transport=gloo says that "
            "CPUs are meant"
        )

    @property
    def share(self) -> Share:
        cluster = self.config.cluster
        ranks = node_range(cluster.nodes)[1] * cluster.ranks_per_node
        on_gpus = is_program(self.config.job) or self.config.transport not in ON_CPUS
        cores = ranks * cluster.cpus_per_rank
        gpus = ranks if on_gpus else 0
        if self.config.transport == "nccl":  # nodes share those that there are
            gpus = min(gpus, len(visible_gpus(os.environ)))
        return Share(ranks=ranks, cores=cores, gpus=gpus)

    def submit(self, request: Request) -> LocalHandle:
        return LocalHandle(request, self.config, survive=self.survives)
