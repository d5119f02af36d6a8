"""Client commands of SLURM (sinfo, scontrol, sacctmgr …), run against one cluster."""

import subprocess

from slurm.errors import DevClusterError
from slurm.install import search_path
from slurm.layout import Layout

_CALL_SECONDS = 60


def environment(at: Layout) -> dict[str, str]:
    """Return a client command's environment, without the caller's own SLURM_* variables."""
    return {"PATH": search_path(), "SLURM_CONF": str(at.slurm_conf)}


def call(at: Layout, *command: str) -> str:
    """Return standard output of a command that must succeed; otherwise raise with its error."""
    try:
        done = subprocess.run(
            command,
            env=environment(at),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DevClusterError(
            f"`{' '.join(command)}` did not end within {_CALL_SECONDS} s; logs: {at.log}"
        ) from error
    if done.returncode != 0:
        raise DevClusterError(
            f"`{' '.join(command)}` ended with {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()}"
        )
    return done.stdout


def node_states(at: Layout) -> dict[str, str]:
    """Return each node's state as sinfo spells it, such as "idle", "mixed" or "down*"."""
    lines = call(at, "sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
    states: dict[str, str] = {}
    for line in lines:
        node, state = line.split()
        states[node] = state
    return states


def queued_jobs(at: Layout) -> list[str]:
    """Return ids of all jobs that have not ended yet, the completing ones included."""
    return sorted(set(call(at, "squeue", "-h", "-a", "-o", "%A").split()))
