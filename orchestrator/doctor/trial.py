"""`doctor --run`: one real collective on the real nodes, as a run of a small program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator.config.command_line import CommandLine, program_overrides
from orchestrator.config.composer import Composer
from orchestrator.doctor import exchange
from orchestrator.doctor.findings import BAD, NOTE, Finding
from orchestrator.rundir.files import read_json
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import read_metrics
from orchestrator.rundir.outcome import describe_culprit
from orchestrator.runs.console import Manner
from orchestrator.runs.start import begun, way_of
from orchestrator.units import format_bytes, format_seconds, plural

LITTLE_MEMORY = 256 << 20
LITTLE_SCRATCH = 16 << 20
DEVICE_TAKEN = 0.25  # of a device's memory, by other processes
CLOCK_S = 5.0
SLOWER = 4.0  # a node is slow if its best link has less than the median's bandwidth divided by this
LEAST_NODES = 3  # from which on a median tells which node is slow


def tried(overrides: Sequence[str], manner: Manner) -> Iterator[Finding]:
    """Start it where `overrides` say, wait for its end, and tell what it measured.

    Raises what a launch raises: what was asked for cannot be had.
    """
    given = (*overrides, *program_overrides([str(Path(exchange.__file__))], beside=overrides))
    if not any(one.startswith("run.dir=") for one in given):
        given += (f"run.dir=runs/doctor_{datetime.now(UTC):%Y-%m-%d_%H-%M-%S}",)
    own = ("run.watch=true", "run.snapshot=false")
    config = Composer(CommandLine(overrides=(*given, *own))).compose().config()
    with begun(config, manner, overrides=given) as ready:
        ended = way_of(ready.cluster)(ready)
    yield from measured(RunDir(Path(config.run.dir or "")), ended.exit_code)


def measured(run: RunDir, exit_code: int) -> Iterator[Finding]:
    """What the run in this folder says of the nodes that it was on."""
    plan, result = run.read_plan(), run.read_result() or {}
    where = f"{plural(plan.get('ranks') or 0, 'rank')} on {plural(plan.get('nodes') or 0, 'node')}"
    if exit_code:
        culprit = result.get("culprit")
        why = describe_culprit(culprit) if culprit else f"exit code {exit_code}"
        yield Finding(
            about="collective", found=f"{where}: {why}", state=BAD,
            do=f"python -m orchestrator logs {run.path}; name the network: cluster.interface=",
        )  # fmt: skip
        return
    yield Finding(about="runs", found=f"{run.path} was written here and read on {where}, and back")
    yield from _nodes(read_json(run.attempt(0) / exchange.NODES_FILE) or {})
    for record in read_metrics(run.metrics).updates:
        figures = record["metrics"]
        yield Finding(
            about="collective",
            found=f"{figures['mib']:g} MiB summed over {where}: "
            f"{format_seconds(figures['seconds'])}, {figures['gigabytes_per_s']:.3g} GB/s a rank",
            state="good" if not record["loss"] else BAD,
            do=""
            if not record["loss"]
            else "the sum is wrong: this network or library corrupts "
            "data; try another transport, and look at the nodes' logs",
        )


def _nodes(measured: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what was measured of each node, then what is wrong with it."""
    nodes = measured.get("nodes", ())
    for one in nodes:
        rate = one["bytes_per_s"]
        speed = f", {format_bytes(rate)}/s to and from other nodes" if rate else ""
        yield Finding(
            about="nodes",
            found=f"{one['node']}: {format_bytes(one['memory'])} of memory free, meets the others "
            f"on {one['interface'] or one['address']}{speed}, its clock {one['clock_s']:+.1f} s",
        )
    yield from node_faults(nodes, measured.get("damaged", ()))


def node_faults(
    nodes: Sequence[Mapping[str, Any]], damaged: Sequence[Sequence[str]]
) -> Iterator[Finding]:
    """Yield the faults of nodes.

    Args:
        nodes: as `exchange.measure_nodes` returns them.
        damaged: pairs of nodes (sender, receiver) between which data came damaged.
    """
    involved = Counter(name for pair in damaged for name in set(pair))
    if involved:
        name, count = min(involved.items(), key=lambda item: (-item[1], item[0]))
        why = f"data that it sent or received came damaged over {count} of {len(damaged)} links"
        yield _fault(name, why, BAD)
    rates = [one["bytes_per_s"] for one in nodes if one["bytes_per_s"] is not None]
    usual = median(rates) if len(rates) >= LEAST_NODES else 0.0
    for one in nodes:
        if one["memory"] < LITTLE_MEMORY:
            yield _fault(one["node"], f"{format_bytes(one['memory'])} of memory are free", BAD)
        if one["scratch"] < LITTLE_SCRATCH:
            room = one["scratch"]
            state = "cannot be written" if room < 0 else f"has {format_bytes(room)} free"
            yield _fault(one["node"], f"its folder for temporary files (TMPDIR) {state}", BAD)
        if one["device_taken"] > DEVICE_TAKEN:
            taken = f"{one['device_taken']:.0%} of a device's memory are taken by other processes"
            yield _fault(one["node"], taken)
        if abs(one["clock_s"]) > CLOCK_S:
            yield _fault(one["node"], f"its clock is {one['clock_s']:+.1f} s off the median")
        if one["bytes_per_s"] is not None and one["bytes_per_s"] * SLOWER < usual:
            where = f"{one['interface']} ({one['address']})" if one["interface"] else one["address"]
            yield _fault(
                one["node"],
                f"its network is slow: {format_bytes(one['bytes_per_s'])}/s, where the median is "
                f"{format_bytes(usual)}/s; it meets the others on {where}",
            )


def _fault(node: str, why: str, state: str = NOTE) -> Finding:
    do = f"leave it out with cluster.exclude={node}, and report it to its administrator"
    return Finding(about="nodes", found=f"{node}: {why}", state=state, do=do)
