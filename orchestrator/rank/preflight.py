"""A rank's part in looking at all nodes before it trains (`run.preflight`)."""

from __future__ import annotations

from orchestrator.config.schema import Config
from orchestrator.engine.api import Engine
from orchestrator.engine.common.waiting import for_others
from orchestrator.errors import NodeUnfit
from orchestrator.lifecycle import quarantine
from orchestrator.lifecycle.preflight.judging import Bad, Seen, as_json, judged, to_be_recorded
from orchestrator.lifecycle.preflight.look import look
from orchestrator.lifecycle.topology import Topology
from orchestrator.run_folder.rundir import RunDir, write_json
from orchestrator.run_warnings import warn


def preflight(
    run: RunDir, attempt: int, config: Config, topology: Topology, engine: Engine
) -> None:
    """Look at all nodes, where that is asked for; rank 0 writes down what was seen. Collective.

    Raises:
        NodeUnfit: on a node nothing is to be computed; on all ranks.
    """
    asked = config.run.preflight
    if not (topology.scheduled if asked is None else asked):
        return
    device_taken = getattr(engine, "device_taken", lambda: 0.0)()
    with for_others("the preflight of all nodes"):
        seen, damaged = look(engine.gather, topology, device_taken)
    bad = judged(seen, damaged)
    if topology.rank == 0:
        write_json(run.preflight(attempt), as_json(seen, bad))
        _tell(run, config, topology, seen, bad)
    unfit = [one for one in bad if one.unfit]
    if unfit:
        nodes = {one.node for one in unfit}
        told = "; ".join(f"node {one.node} is not fit to compute on: {one.why}" for one in unfit)
        raise NodeUnfit(told, [topology.rank] if topology.node in nodes else [])


def _tell(
    run: RunDir, config: Config, topology: Topology, seen: list[Seen], bad: list[Bad]
) -> None:
    """Warn of nodes that are bad; those of a cluster are left out of the next submission."""
    recorded = to_be_recorded(bad, len(seen)) if topology.scheduled else []
    said = {one.node: "" for one in bad}
    for one in recorded:
        try:
            entry = quarantine.add(
                one.node, one.why, slurm_conf=config.cluster.slurm_conf, run=str(run.path)
            )
        except OSError as error:  # no home on compute nodes, say: the run itself can go on
            said[one.node] = f"; that could not be recorded: {error}"
        else:
            hours = (entry.until - entry.since) / 3600
            said[one.node] = (
                f"; it is in quarantine for {hours:g} hours (python -m orchestrator quarantine)"
            )
    for one in bad:
        if not one.unfit or one in recorded:
            warn(f"node {one.node}: {one.why}{said[one.node]}")
