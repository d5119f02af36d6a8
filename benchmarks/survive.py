"""The cost of surviving without a loss, the recovery time, and goodput under repeated losses.

torchft is measured in the same way, over gloo.
"""

from __future__ import annotations

import itertools
import random
import resource
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.markdown import grid, spread_cells
from benchmarks.measure import Spread, interleaved, keep, machine, rows_of, wait_for
from benchmarks.watched_run import WatchedRun
from orchestrator import Job, Loss

WIDTH, SAMPLES, RANKS = 256, 4096, 4
WITHOUT, WITH = "run.survive=false", "run.survive=true"
EVERY_S, KILLS = 15.0, 40
NOTE = f"""\
A net of 4 layers of {WIDTH} with Adam, {RANKS} ranks on 2 simulated nodes that share this
machine's processors, 4 micro-steps an update, in reproducible mode. Cost: whole runs by turns with
and without `run.survive`, no rank dies; seconds of 500 updates, and the processor seconds of all
processes. Losses: a rank, rank 0 as often as others, is killed (kill -9) in the middle of a
window. It is noticed when the last survivor begins to form the next group; the others are back at
work when that group exists; the time lost is from the beginning of the redone window until
then. Goodput: a kill every {EVERY_S:g} s, as often as the table says; killed ranks
come back (`run.max_replacements`). Useful is the time of updates that counted, of all time from
the first window to the last boundary. torchft (its Manager over ProcessGroupGloo, a replica a
process, one lighthouse that waits 1 s for the silent where its defaults are 5 s and 60 s; in a
network namespace of its own, since it listens on every interface; killed replicas are started
again) trains the same net with as many samples a replica; useful there is the time of committed
steps, without waits for the next quorum. There a step of fewer replicas has fewer samples, and the
step in which a rank died is left out: neither counts against it here, but its final weights differ
for this reason."""


class Work(Job):
    """Something to compute."""

    def model(self) -> nn.Module:
        """Return the net."""
        return net()

    def dataset(self) -> TensorDataset:
        """Return the same numbers on every rank."""
        made = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(SAMPLES, WIDTH, generator=made))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return a loss that grows with the output."""
        return Loss(loss_of(model, batch[0]), len(batch[0]))


def net() -> nn.Module:
    """Return the net, the same for all contenders."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the loss as a sum over samples."""
    return model(batch).square().mean(1).sum()


def processor_seconds() -> float:
    """Return the CPU seconds of our ended child processes and their descendants."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return of_children.ru_utime + of_children.ru_stime


def losses(
    records: list[dict[str, Any]], kills: list[tuple[float, int]]
) -> Iterator[dict[str, Any]]:
    """Return the seconds that each kill cost."""
    changes = [(index, one) for index, one in enumerate(records) if "survived" in one]
    for (killed, rank), (index, change) in zip(kills, changes, strict=True):
        redone = next(one for one in records[index:] if "loss" in one)
        back = redone["time"] - redone["update_s"]
        began = next(one["time"] for one in reversed(records[:index]) if "loss" in one)
        formed = change["survived"]["seconds"]
        yield {
            "rank": rank,
            "noticed": max(0.0, back - formed - killed),
            "back": back - killed,
            "lost": back - began,
        }


def useful(records: list[dict[str, Any]]) -> dict[str, float]:
    """Return how long a run trained, and how much of it in updates that counted, in seconds."""
    whole = records[-1]["time"] - records[0]["time"] + records[0]["update_s"]
    return {"whole": whole, "useful": sum(one["update_s"] for one in records)}


def disturbed(
    updates: int, victims: list[int], every_s: float, digest: str, *, replaced: bool = False
) -> dict[str, Any]:
    """Run with `victims` killed one after another; return the figures.

    Args:
        replaced: each is replaced before the next one is killed.
    """
    run = WatchedRun(updates, WITH, f"run.max_replacements={len(victims) if replaced else 0}")
    try:
        wait_for(lambda: len(run.records()) >= 5, "training")
        for number, rank in enumerate(victims):
            if number:
                time.sleep(every_s)  # the measured interval between kills
            run.kill(rank)
            wait_for(lambda n=number: _noted(run.records(), "survived") > n, "going on")
            if replaced:
                wait_for(lambda n=number: _noted(run.records(), "joined") > n, "coming back")
        ended, lines = run.end(), run.records()
        records = [one for one in lines if "loss" in one]
        if [one["update"] for one in records] != list(range(updates)):
            raise RuntimeError("an update is missing, or is recorded twice")
        return {
            "losses": list(losses(lines, run.kills)),
            **useful(records),
            "equal": ended["weights_sha256"] == digest,
        }
    finally:
        run.close()


def _noted(records: list[dict[str, Any]], key: str) -> int:
    return sum(key in one for one in records)


def undisturbed(updates: int, survive: str = WITH) -> tuple[str, float]:
    """Return the digest and the seconds of an undisturbed run's training."""
    run = WatchedRun(updates, survive)
    try:
        ended = run.end()
        return ended["weights_sha256"], ended["seconds"]
    finally:
        run.close()


def body(data: dict[str, Any]) -> str:
    """Return the page: all figures, in two tables."""
    of = data["losses"]
    lines: list[list[str]] = []
    told_of = {"seconds": "an undisturbed run", "processor": "processor seconds of a run"}
    for key, told in told_of.items():
        cost = next(row for row in data["cost"][key] if row["name"] == WITH)["ratio"]
        measured = f"{told} with `{WITH}`, to one without"
        lines.append([measured, *spread_cells(cost, ".3f"), f"{cost['high']:.3f}"])
    words = {
        "noticed": "a killed rank is noticed (s)",
        "back": "the others are back at work (s after the kill)",
        "lost": "time lost a kill, the broken window's included (s)",
    }
    for key, told in words.items():
        one = of[key]
        lines.append([told, *spread_cells(one, ".2f"), f"{one['high']:.2f}"])
    figures = grid(["measured", "median", "quartiles", "largest"], lines)
    kills: list[list[str]] = []
    for row in data["goodput"]:
        if row["why"]:
            useful, lost = row["why"], "-"
        else:
            useful, lost = f"{row['useful']:.1%}", f"{row['lost']:.2f}"
        kills.append([row["name"], str(row["kills"]), useful, lost, str(row["equal"])])
    head = ["a kill every 15 s", "kills", "useful time", "lost a kill (s)", "undisturbed digest"]
    return f"{NOTE}\n\n{figures}\n\n{grid(head, kills)}"


def goodput(kills: int, update_s: float, every_s: float) -> dict[str, Any]:
    """Run with a rank killed again and again, and replaced."""
    # More than it would take: fewer ranks on a machine with few processors are faster.
    updates = int(1.5 * every_s * (kills + 0.5) / update_s)
    digest, _ = undisturbed(updates)
    run = disturbed(updates, victims_of(kills), every_s, digest, replaced=True)
    share = run["useful"] / run["whole"]
    return {
        "name": "ours",
        "kills": kills,
        "useful": share,
        "lost": run["whole"] * (1 - share) / kills,
        "equal": "yes" if run["equal"] else "no",
        "why": "",
    }


def victims_of(kills: int) -> list[int]:
    """Return the ranks to kill, the same for all contenders."""
    chance = random.Random(7)  # noqa: S311  # it has to repeat
    return [chance.randrange(RANKS) for _ in range(kills)]


def costs(updates: int, count: int, warm_up: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Measure the cost without a loss: whole runs in turn, with and without.

    Returns the wall seconds of training, and the CPU seconds of all of a run's processes.
    """
    processor: dict[str, list[float]] = {WITHOUT: [], WITH: []}

    def one(way: str) -> float:
        before = processor_seconds()
        _, seconds = undisturbed(updates, way)
        processor[way].append(processor_seconds() - before)
        return seconds

    passed = interleaved({way: partial(one, way) for way in processor}, count, warm_up=warm_up)
    taken = {way: found[warm_up:] for way, found in processor.items()}
    return {"seconds": rows_of(passed, WITHOUT), "processor": rows_of(taken, WITHOUT)}


def main(*, quick: bool = False) -> None:
    """Measure all parts, in some forty minutes, or four."""
    cost = costs(60, 2, warm_up=0) if quick else costs(500, 9)
    digest, seconds = undisturbed(60)
    victims = itertools.islice(itertools.cycle(range(RANKS)), 2 if quick else 12)
    found = [one for v in victims for one in disturbed(60, [v], 0.0, digest)["losses"]]
    spreads = {
        key: Spread.of([one[key] for one in found]).rounded() for key in ("noticed", "back", "lost")
    }
    from benchmarks import survive_torchft

    every_s, kills = (4.0, 3) if quick else (EVERY_S, KILLS)
    theirs = survive_torchft.goodput(victims_of(kills), every_s)
    rows = [goodput(kills, seconds / 60, every_s), theirs]
    keep(
        "survive",
        {"machine": machine(), "cost": cost, "losses": spreads, "goodput": rows},
        quick=quick,
    )
