"""The page, the README's summary and the table of losses, from the results of `peers`."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks import peers_tables as tables
from benchmarks.markdown import grid
from benchmarks.peers_tables import OURS, Row, distinct, mib, select

WORSE = 1.02
"""A ratio above this is told as a loss, also where the spread of the rounds reaches below 1."""

METHOD = """\
Every contender trains its own copy of the net from the same weights on the same micro-batches with
torch's AdamW, one thread a rank, in the same processes, in turn, each round beginning with another;
two updates of each are not counted. Seconds are from barrier to barrier. The ratio is the median
over rounds of a contender's seconds to those of DDP + no_sync in the same round (quartiles in
brackets). Bytes are what one rank's network interface sent in an update, headers included, to the
floor of 2(R-1)/R of the gradient's bytes; collectives are the process group's own count. Peers have
default bucket sizes, as we do, and gradients as views of the buckets; FSDP2 keeps its weights
gathered in a window. Ours also reduces the loss and checks that it and the gradient are finite,
which the peers are not asked to."""

OVERSUBSCRIBED = (
    "Four ranks share {cores} cores here, so they compute in each other's time: compare "
    "contenders, not R = 4 with R = 2."
)


def lost(data: Row, name: str = OURS) -> list[Row]:
    """Return every cell in which `name` takes longer than DDP + no_sync, noisy ones included."""
    return [row for row in select(data["times"], name=name) if row["ratio"]["median"] > WORSE]


def typical(data: Row, name: str, beside: str, **where: Any) -> float:
    """Return the median over cells of one contender's ratio to another."""
    others = {_place(row): row["ratio"]["median"] for row in select(data["times"], name=beside)}
    rows = select(data["times"], name=name, **where)
    return median(row["ratio"]["median"] / others[_place(row)] for row in rows)


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("net", "ranks", "link", "steps"))


def verdict(data: Row) -> str:
    """Describe how often, and where most, ours is slower than the reference."""
    rows, slower = select(data["times"], name=OURS), lost(data)
    text = (
        f"Ours takes {median(row['ratio']['median'] for row in rows):.2f} times the seconds of "
        f"{data['reference']} in the median of {len(rows)} cells"
    )
    if not slower:
        return f"{text}, and in none more than {WORSE:.2f} times."
    worst = max(slower, key=lambda row: row["ratio"]["median"])
    unsure = sum(row["ratio"]["q1"] <= 1 for row in slower)
    noise = f" ({unsure} of them within the spread of the rounds)" if unsure else ""
    return (
        f"{text}. In {len(slower)} it is slower by more than {WORSE - 1:.0%}{noise}, at worst "
        f"{worst['ratio']['median']:.2f} times ({worst['net']}, R = {worst['ranks']}, "
        f"K = {worst['steps']}, {worst['link']})."
    )


def _notes(data: Row) -> list[str]:
    notes = [METHOD, verdict(data), beside_all(data)]
    if 4 in distinct(data["times"], "ranks") and data["machine"]["cores"] < 4:
        notes.append(OVERSUBSCRIBED.format(cores=data["machine"]["cores"]))
    notes += [f"Skipped: {name}, which {reason}." for name, reason in data["skipped"].items()]
    return notes


def body(data: Row) -> str:
    """Return the page."""
    nets = "; ".join(f"{net}: {count:,} parameters" for net, count in data["parameters"].items())
    parts = [*_notes(data), f"Nets: {nets}.", "## Time of an update", tables.times(data)]
    parts += ["## Bytes to the floor, and collectives", tables.traffic(data)]
    parts += ["## Peak memory", tables.memory(data)]
    parts += ["## Time to a given loss", tables.to_loss(data), "![time](peers-time.svg)"]
    return "\n\n".join(parts)


def _range(rows: list[Row]) -> str:
    if not rows:
        return "not measured"
    ratios = [row["ratio"]["median"] for row in rows]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def beside_all(data: Row) -> str:
    """Compare ours with each other contender in the median of cells, and the cost of equal bits."""
    others = [name for name in data["contenders"] if not name.startswith(OURS)]
    told = [
        f"{typical(data, OURS, name):.2f} of {name}"
        for name in others
        if name not in data["missing"]
    ]
    price = typical(data, f"{OURS}, reproducible", OURS)
    return (
        f"The seconds of ours in the median of cells: {', '.join(told)}. "
        f"Those of equal bits: {price:.2f} times our fast mode."
    )


def summary(data: Row) -> str:
    """Return the README's table: R = 2, a line for each contender."""
    links = distinct(data["times"], "link")
    most = max(distinct(data["times"], "steps"))
    net = data["peaks"][0]["net"]
    lines: list[list[str]] = []
    for name in data["contenders"]:
        if name in data["missing"]:
            lines.append([name, data["missing"][name], *[""] * (len(links) + 1)])
            continue
        rows = select(data["times"], name=name, ranks=2)
        last = select(rows, net=net, link=links[-1], steps=most)
        peak = select(data["peaks"], name=name)[-1]["bytes"]["median"]
        ratios = [_range(select(rows, link=link)) for link in links]
        lines.append([name, *ratios, tables.sent(last, data["parameters"][net]), mib(peak)])
    head = ["", *(f"time, {link}" for link in links)]
    head += [f"bytes to the floor, collectives (K = {most})", "peak MiB"]
    return f"{grid(head, lines)}\n\n{verdict(data)} {_circumstances(data)}"


def _circumstances(data: Row) -> str:
    machine = data["machine"]
    hurry = "; a quick run" if data["quick"] else ""
    return f"({machine['cores']} cores, load average {machine['load']} before it began{hurry}.)"
