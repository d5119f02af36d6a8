"""Removal of a run's unpacked code from a node, however the node's agent ended."""

from __future__ import annotations

from orchestrator.agent.topology import BATCH_COPY_VARIABLE
from orchestrator.rundir.folder import RunDir
from orchestrator.start_from_copy import DISK, MEMORY, NAME

SCRIPT = "after_node.sh"
BATCH_PID_VARIABLE = "ORCHESTRATOR_BATCH_PID"


def after_node(run: RunDir, quoted: str) -> str:
    """Return the shell that the scheduler starts after a node's task (--task-epilog).

    Args:
        quoted: the run's folder, quoted for the shell.
    """
    return f"""\
#!/bin/sh
# Started by the scheduler on each node whose task has ended.
exec >/dev/null 2>&1
run={quoted}
mine={NAME}-$(id -u) start=$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}-$SLURMD_NODENAME
if [ "${BATCH_COPY_VARIABLE}" = "$SLURMD_NODENAME:${{TMPDIR-}}" ] &&
    kill -0 "${BATCH_PID_VARIABLE}"; then  # the batch script runs from it, and removes it
    exit
fi
for base in "${{TMPDIR:-{DISK}}}" {MEMORY} {DISK} "$run/{run.code.name}"; do
    for copy in "$base/$mine"-*-"$start"; do
        [ ! -d "$copy" ] || flock -n "$copy" rm -rf "$copy"
    done
done
"""
