"""Runs that are submitted and left alone: say how to find them again, follow them on demand.

The launcher holds nothing of such a run. What it prints here, any shell can see later.
"""

from __future__ import annotations

from orchestrator.clusters.api import State
from orchestrator.plugins import CLUSTERS
from orchestrator.report.terminal import command, say
from orchestrator.rundir.outcome import Ended
from orchestrator.runs.ready import Ready


def queue(ready: Ready) -> Ended:
    """Queue the run and return, or follow it when `run.watch` says so."""
    run, manner, cluster = ready.run, ready.manner, ready.cluster
    with CLUSTERS.told(ready.config.cluster.kind, "to submit the run"):
        handle = cluster.submit(ready.request)
    if not manner.quiet:
        say(manner.console, f"{handle.title} is queued", "bold green")
        say(manner.console, f"run folder: {run.path}")
        for verb, hint in (("status", ""), ("logs", " -f"), ("cancel", "")):
            say(manner.console, f"  {command(verb, run.path)}{hint}")
    if not ready.config.run.watch:
        return Ended(run=run, state=State.PENDING, exit_code=0)
    from orchestrator.runs.attach import follow

    return follow(handle, run, manner, ready.interrupts)
