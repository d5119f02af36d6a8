"""The verb about nodes that submissions leave out: `quarantine`."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console

from orchestrator.cli.options import Json, Verbose, print_json
from orchestrator.errors import UsageError
from orchestrator.lifecycle import quarantine as kept
from orchestrator.report.terminal import say


class Action(StrEnum):
    """What is done about them."""

    LIST = "list"
    ADD = "add"
    CLEAR = "clear"


def quarantine(
    action: Annotated[Action, typer.Argument(help="What to do.")] = Action.LIST,
    nodes: Annotated[list[str] | None, typer.Argument(help="Names of nodes: n1 n2.")] = None,
    reason: Annotated[str, typer.Option(help="add: why.")] = "said by hand",
    hours: Annotated[float, typer.Option(help="add: for how long.")] = kept.HOURS,
    slurm_conf: Annotated[
        str | None, typer.Option(help="Of another cluster than the machine's own.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="clear: every node there is.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show the nodes that this account's SLURM runs leave out, put some in, or take them out.

    A node that a run's preflight found bad is put in by itself. They stay for a day.
    """
    del verbose
    named = nodes or []
    if action is Action.LIST and named:
        raise UsageError("quarantine list takes no nodes; to put them in: quarantine add NODE")
    if action is not Action.LIST and bool(named) == (everything and action is Action.CLEAR):
        also = ", or --all" if action is Action.CLEAR else ""
        raise UsageError(f"quarantine {action} needs the names of nodes{also}")
    if action is Action.ADD:
        _add(named, reason, slurm_conf, hours)
    elif action is Action.CLEAR:
        _clear(named, slurm_conf)
    _show(as_json=as_json)


def _add(nodes: list[str], reason: str, slurm_conf: str | None, hours: float) -> None:
    for node in nodes:  # all of them are names, or nothing is written
        kept.checked(node, hours)
    for node in nodes:
        kept.add(node, reason, slurm_conf=slurm_conf, hours=hours)


def _clear(nodes: list[str], slurm_conf: str | None) -> None:
    if not nodes:
        for entry in kept.of_all():
            kept.clear(entry.node, slurm_conf=entry.cluster or None)
        return
    there = {entry.node for entry in kept.of_cluster(slurm_conf)}
    if missing := [node for node in nodes if node not in there]:
        raise UsageError(
            f"not in quarantine: {', '.join(missing)}; `python -m orchestrator quarantine` has "
            "those that are, with their clusters (--slurm-conf)"
        )
    for node in nodes:
        kept.clear(node, slurm_conf=slurm_conf)


def _show(*, as_json: bool) -> None:
    entries = kept.of_all()
    if as_json:
        print_json([entry.to_json() for entry in entries])
        return
    console = Console()
    for entry in entries:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.until))
        of = f" of {entry.cluster}" * bool(entry.cluster) + f" ({entry.run})" * bool(entry.run)
        say(console, f"{entry.node:<16} until {until}  {entry.reason}{of}")
    if not entries:
        say(console, "no node is in quarantine", "dim")
