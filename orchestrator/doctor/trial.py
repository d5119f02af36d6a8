"""`doctor --run`: one real collective on the real nodes, as a run of a small program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.compose.command_line import CommandLine, program_overrides
from orchestrator.compose.composer import Composer
from orchestrator.doctor import exchange
from orchestrator.doctor.findings import BAD, NOTE, Finding
from orchestrator.report.metrics import read_metrics
from orchestrator.report.tables.closing_table import describe_culprit
from orchestrator.report.units import format_bytes, format_seconds, plural
from orchestrator.run_folder.rundir import RunDir, read_json
from orchestrator.runs.console import Manner
from orchestrator.runs.start import begun, way_of


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
    yield from _nodes(read_json(run.preflight(0)) or {})
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


def _nodes(seen: Mapping[str, Any]) -> Iterator[Finding]:
    """What a preflight wrote of each node, and of those that are bad."""
    for one in seen.get("nodes", ()):
        rate = one["bytes_per_s"]
        speed = f", {format_bytes(rate)}/s to and from other nodes over TCP" if rate else ""
        yield Finding(
            about="nodes",
            found=f"{one['node']}: {format_bytes(one['memory'])} of memory free, meets the others "
            f"on {one['interface'] or one['address']}{speed}, its clock {one['clock_s']:+.1f} s",
        )
    for one in seen.get("bad", ()):
        yield Finding(
            about="nodes", found=f"{one['node']}: {one['why']}",
            state=BAD if one["unfit"] else NOTE,
            do=f"python -m orchestrator quarantine add {one['node']}, and tell its administrator",
        )  # fmt: skip
