"""Ours against what people use today: time, bytes, collectives, memory, time to a given loss.

The same weights, data, optimizer, threads and processes for all, in turn in the same
processes; `benchmarks.contenders` says how each is set up, `benchmarks.peers_page` how it is shown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from benchmarks.contenders import ALL, missing
from benchmarks.link import Link, cannot_make_networks, loopback, switched
from benchmarks.measure import Spread, keep, machine
from benchmarks.ranks import on_ranks

REFERENCE = "DDP + no_sync"
NETS = ("mlp", "transformer")
SHAPED = "1 Gbit/s"
LOSS_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Extent of a measurement: an hour on two cores for the whole, minutes for a quick run."""

    ranks: Sequence[int]
    steps: Sequence[int]
    repetitions: tuple[int, int]
    budget_s: float
    updates: int
    loss_nets: Sequence[str]
    loss_links: Sequence[str]
    memory_steps: Sequence[int]
    memory_repetitions: int


WHOLE = Extent(
    ranks=(2, 4),
    steps=(1, 2, 4, 8, 16),
    repetitions=(7, 21),
    budget_s=15.0,
    updates=40,
    loss_nets=NETS,
    loss_links=("loopback", SHAPED),
    memory_steps=(1, 16),
    memory_repetitions=7,
)
QUICK = Extent(
    ranks=(2,),
    steps=(1, 8),
    repetitions=(7, 7),
    budget_s=0.0,
    updates=25,
    loss_nets=("mlp",),
    loss_links=(SHAPED,),
    memory_steps=(1, 8),
    memory_repetitions=1,
)


class Peers:
    """Measures, and keeps what it has after every part, so that a long run's work is not lost."""

    def __init__(self, *, quick: bool) -> None:
        self._quick, self._extent = quick, QUICK if quick else WHOLE
        absent = {name: reason for name in ALL if (reason := missing(name))}
        self._names = [name for name in ALL if name not in absent]
        reason = cannot_make_networks()
        self.data: dict[str, Any] = {
            "machine": machine(),
            "reference": REFERENCE,
            "contenders": list(ALL),
            "missing": absent,
            "skipped": {} if reason is None else {SHAPED: reason},
            "loss_steps": LOSS_STEPS,
            "parameters": {},
            "load": [],
            "times": [],
            "losses": [],
            "peaks": [],
        }

    def run(self) -> None:
        """Measure all parts."""
        for ranks in self._extent.ranks:
            for name in self._links():
                with _made(name, ranks) as link:
                    for net in NETS:
                        self._times(link, net)
        for name in self._links():
            if name in self._extent.loss_links:
                with _made(name, 2) as link:
                    for net in self._extent.loss_nets:
                        self._losses(link, net)
        with loopback(2) as link:
            self._peaks(link)

    def _links(self) -> list[str]:
        return [name for name in ("loopback", SHAPED) if name not in self.data["skipped"]]

    def _times(self, link: Link, net: str) -> None:
        ranks = len(link.prefixes)
        extent = self._extent
        found = self._on_ranks(
            link,
            "times",
            net,
            self._names,
            leaves=[ranks * steps for steps in extent.steps],
            repetitions=extent.repetitions,
            budget_s=extent.budget_s,
            reference=REFERENCE,
        )
        for row in found:
            steps = row.pop("leaves") // ranks
            self.data["times"].append(
                {"net": net, "ranks": ranks, "link": link.name, "steps": steps, **row}
            )
        self._keep()

    def _losses(self, link: Link, net: str) -> None:
        leaves = [len(link.prefixes) * LOSS_STEPS]
        found = self._on_ranks(
            link, "losses", net, self._names, leaves=leaves, updates=self._extent.updates
        )
        for row in found:
            row["losses"] = [float(f"{loss:.7g}") for loss in row["losses"]]
            row["seconds"] = [float(f"{second:.4g}") for second in row["seconds"]]
            self.data["losses"].append({"net": net, "link": link.name, **row})
        self._keep()

    def _peaks(self, link: Link) -> None:
        """Measure memory of the larger net, each contender in its own processes, in turn."""
        ranks, net = len(link.prefixes), "mlp"
        leaves = [ranks * steps for steps in self._extent.memory_steps]
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(self._extent.memory_repetitions):
            for name in self._names:
                for row in self._on_ranks(link, "peaks", net, [name], leaves=leaves):
                    found.setdefault((name, row["leaves"] // ranks), []).append(row["bytes"])
        for (name, steps), figures in found.items():
            self.data["peaks"].append(
                {
                    "net": net,
                    "ranks": ranks,
                    "steps": steps,
                    "name": name,
                    "bytes": Spread.of(figures).rounded(),
                }
            )
        self._keep()

    def _on_ranks(
        self, link: Link, kind: str, net: str, names: Sequence[str], **more: Any
    ) -> list[dict[str, Any]]:
        print(f"{kind}: {net}, {len(link.prefixes)} ranks, {link.name}, {', '.join(names)}")
        found = on_ranks(link, {"kind": kind, "net": net, "contenders": list(names), **more})
        self.data["parameters"][net] = found["parameters"]
        self.data["load"].append(round(os.getloadavg()[0], 1))
        return found["rows"]

    def _keep(self) -> None:
        keep("peers", self.data, quick=self._quick)


def _made(name: str, ranks: int) -> AbstractContextManager[Link]:
    return loopback(ranks) if name == "loopback" else switched(ranks, "1gbit", name)


def main(*, quick: bool = False) -> None:
    peers = Peers(quick=quick)
    for name, reason in {**peers.data["missing"], **peers.data["skipped"]}.items():
        print(f"{name}: {reason}")
    peers.run()
