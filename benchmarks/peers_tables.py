"""Tables of the figures of `peers`: times, traffic, memory, time to a given loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

from benchmarks.markdown import grid

Row = dict[str, Any]

OURS = "ours"

TARGETS = {"mlp": 2.6, "transformer": 3.05}
"""The loss to reach, of each net."""

SMOOTHED = 5
"""A loss counts as reached when the mean of so many updates' losses is there."""


def select(rows: Iterable[Row], **where: Any) -> list[Row]:
    """Return the rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """Return the values of `key`, in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def milliseconds(seconds: float) -> str:
    """Format three digits, or whole milliseconds.

    >>> milliseconds(0.01234), milliseconds(1.234)
    ('12.3', '1,234')
    """
    return f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.3g}"


def cell(rows: list[Row]) -> str:
    """Format milliseconds, and the ratio with its quartiles, of the only row."""
    if not rows:
        return "not measured"
    (row,) = rows
    ratio = row["ratio"]
    return (
        f"{milliseconds(row['spread']['median'])} ms **{ratio['median']:.2f}** "
        f"({ratio['q1']:.2f} to {ratio['q3']:.2f})"
    )


def sent(rows: list[Row], parameters: int) -> str:
    """Format bytes relative to the floor, and collectives, of the only row."""
    if not rows:
        return "not measured"
    (row,) = rows
    ranks = row["ranks"]
    share = "not counted"
    if row["bytes"] is not None:
        share = f"{row['bytes'] / (2 * (ranks - 1) / ranks * 4 * parameters):.3f}"
    return f"{share}, {row['collectives']}"


def by_steps(data: Row, rows: list[Row], cell: Callable[[list[Row]], str]) -> str:
    """Return a table: a line for each contender, with `cell` of its rows for each K."""
    steps = distinct(rows, "steps")
    lines: list[list[str]] = []
    for name in data["contenders"]:
        if name in data["missing"]:
            lines.append([name, data["missing"][name]] + [""] * (len(steps) - 1))
        else:
            lines.append([name, *(cell(select(rows, name=name, steps=k)) for k in steps)])
    return grid(["contender", *(f"K = {k}" for k in steps)], lines)


def times(data: Row) -> str:
    """Return seconds of an update: a table for each net, number of ranks and link."""
    return _of_updates(data, distinct(data["times"], "link"), lambda _: cell)


def traffic(data: Row) -> str:
    """Return bytes relative to the floor, and collectives, of an update."""
    link = distinct(data["times"], "link")[-1]
    return _of_updates(data, [link], lambda net: partial(sent, parameters=data["parameters"][net]))


def _of_updates(
    data: Row, links: Sequence[str], cell_of: Callable[[str], Callable[[list[Row]], str]]
) -> str:
    parts: list[str] = []
    places = product(*(distinct(data["times"], key) for key in ("net", "ranks")), links)
    for net, ranks, link in places:
        if rows := select(data["times"], net=net, ranks=ranks, link=link):
            parts += [f"### {net}, R = {ranks}, {link}", by_steps(data, rows, cell_of(net))]
    return "\n\n".join(parts)


def memory(data: Row) -> str:
    """Return peak memory beyond what the process had before the model was built."""
    if not data["peaks"]:
        return "Not measured."
    first = data["peaks"][0]

    def peak(rows: list[Row]) -> str:
        if not rows:
            return "not measured"
        spread = rows[0]["bytes"]
        return f"{spread['median'] / 2**20:.0f} ({mib(spread['q1'])} to {mib(spread['q3'])})"

    gradient = 4 * data["parameters"][first["net"]]
    return (
        f"{first['net']}, R = {first['ranks']}, MiB of rank 0 beyond what its process had before "
        "the model was built, each contender in processes of its own. Weights, gradients and "
        f"AdamW's two moments are {mib(4 * gradient)} MiB of it, a gradient {mib(gradient)}.\n\n"
    ) + by_steps(data, data["peaks"], peak)


def mib(number: float) -> str:
    """Format bytes in MiB."""
    return f"{number / 2**20:.0f}"


def reached(row: Row, target: float) -> int | None:
    """Return after how many updates the smoothed loss reaches the target, or None."""
    losses = row["losses"]
    for end in range(SMOOTHED, len(losses) + 1):
        if sum(losses[end - SMOOTHED : end]) / SMOOTHED <= target:
            return end
    return None


def to_loss(data: Row) -> str:
    """Return the time to a given loss."""
    parts: list[str] = []
    for net in distinct(data["losses"], "net"):
        for link in distinct(data["losses"], "link"):
            rows = select(data["losses"], net=net, link=link)
            target = TARGETS[net]
            ours = select(rows, name=OURS)[0]["losses"]
            lines: list[list[str]] = []
            for name in data["contenders"]:
                if name in data["missing"]:
                    lines.append([name, data["missing"][name], "", ""])
                    continue
                (row,) = select(rows, name=name)
                updates = reached(row, target)
                apart = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], ours, strict=True))
                seconds = "not reached"
                if updates is not None:
                    seconds = f"{sum(row['seconds'][:updates]):.2f}"
                same = "equal" if apart == 0 else f"{apart:.0e}"
                lines.append([name, seconds, str(updates or "-"), same])
            head = ["contender", "seconds", "updates", "losses, to 7 digits, beside ours"]
            heading = f"### {net}, R = 2, K = {data['loss_steps']}, {link}: to a loss of {target}"
            parts += [heading, grid(head, lines)]
    return "\n\n".join(parts)
