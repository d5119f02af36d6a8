"""One node of a run, where a scheduler or a plug-in starts a process on each node.

`python -m orchestrator.agent.node RUN --attempt N`, with SLURM's variables of the node in the
environment. The process imports the framework once and is the parent of the node's agent, which it
restarts if it is killed and workers may be replaced (`local_nodes.py`).
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.agent.agent import Agent
from orchestrator.agent.local_nodes import NodeProcesses
from orchestrator.agent.node_spec import NodeSpec, agent_file
from orchestrator.agent.processes import exit_with, set_parent_death_signal
from orchestrator.agent.topology import ADDRESS_VARIABLE, NODE_VARIABLE, Topology, node_names
from orchestrator.agent.workers import STOP_SIGNALS
from orchestrator.config.reading import read_config
from orchestrator.config.rules import planned_survival
from orchestrator.config.schema import Config
from orchestrator.errors import JobError
from orchestrator.rundir.files import await_disk_space, write_json
from orchestrator.rundir.folder import RunDir

log = logging.getLogger(__name__)


def node_spec(run: RunDir, attempt: int, config: Config, env: Mapping[str, str]) -> NodeSpec:
    """Return the node's spec; the job's shape comes from the environment.

    Raises:
        UsageError: a variable is missing, or other nodes cannot reach the node.
    """
    topology = Topology.from_env({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", **env})
    names = node_names(env) or (topology.node,)
    try:
        survive = planned_survival(config).on
    except JobError:  # each worker reads the same, and reports it in the rank's log
        survive = False
    again = NODE_VARIABLE in env
    earlier = agent_file(run, attempt, topology.node_index) if again else None
    return NodeSpec.of(
        config,
        run.path,
        attempt,
        survive=survive,
        index=topology.node_index,
        names=tuple(names[: topology.nodes]),
        address=topology.address,
        incarnation=0 if earlier is None else earlier.incarnation + 1,
    )


def worker_environment(spec: NodeSpec) -> dict[str, str]:
    """Return SLURM's job variables, as if each worker were a task."""
    width, ranks = spec.ranks_per_node, spec.ranks
    each = f"{width}(x{spec.nodes})" if spec.nodes > 1 else str(width)
    return {
        "SLURM_NTASKS": str(ranks),
        "SLURM_NPROCS": str(ranks),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_NTASKS_PER_NODE": str(width),
        "SLURM_TASKS_PER_NODE": each,
        "SLURM_STEP_TASKS_PER_NODE": each,
        "SLURM_CPUS_PER_TASK": str(spec.cpus_per_rank),
        "SLURM_GTIDS": ",".join(map(str, spec.ranks_of(spec.index))),
        ADDRESS_VARIABLE: spec.address,
    }


def run_node(path: Path, attempt: int, agent_of: Callable[[NodeSpec], Agent] = Agent) -> int:
    """Run this node, or one of its workers, to the end; return the exit status."""
    run = RunDir(path)
    config = read_config(run.existing().read_config())
    spec = node_spec(run, attempt, config, os.environ)
    ranks = list(spec.ranks_of(spec.index))
    path = run.node_ranks(attempt, spec.index)
    table = {"node": spec.name, "ranks": ranks, "time": time.time()}
    await_disk_space(lambda: write_json(path, table), log.warning)
    return NodeProcesses([spec], [worker_environment(spec)], agent_of).run()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.agent.node")
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, default=0)
    arguments = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until the agent can handle them
    set_parent_death_signal(os.getppid())
    exit_with(lambda: run_node(arguments.run, arguments.attempt))


if __name__ == "__main__":
    main()
