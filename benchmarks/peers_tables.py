"""Tables of the figures of `peers`: times, traffic, memory, time to a given loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

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


def grid(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the first column to the left."""
    rule = "|---|" + "---:|" * (len(head) - 1)
    return "\n".join(
        [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(one)} |" for one in lines)]
    )


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


def by_contender(
    data: Row, rows: list[Row], cell: Any, columns: Sequence[Any], key: str = "steps"
) -> list[list[str]]:
    """Return a line for each contender, with `cell` of its rows at each of the columns."""
    lines: list[list[str]] = []
    for name in data["contenders"]:
        if name in data["missing"]:
            lines.append([name, data["missing"][name]] + [""] * (len(columns) - 1))
        else:
            found = [cell(select(rows, name=name, **{key: column})) for column in columns]
            lines.append([name, *found])
    return lines


def times(data: Row) -> str:
    """Return seconds of an update: a table for each net, link and number of ranks."""
    parts: list[str] = []
    for net in distinct(data["times"], "net"):
        for ranks in distinct(data["times"], "ranks"):
            for link in distinct(data["times"], "link"):
                rows = select(data["times"], net=net, ranks=ranks, link=link)
                if rows:
                    steps = distinct(rows, "steps")
                    heading = f"### {net}, R = {ranks}, {link}"
                    table = grid(
                        ["contender", *(f"K = {k}" for k in steps)],
                        by_contender(data, rows, cell, steps),
                    )
                    parts += [heading, table]
    return "\n\n".join(parts)


def traffic(data: Row) -> str:
    """Return bytes relative to the floor, and collectives, of an update."""
    parts: list[str] = []
    link = distinct(data["times"], "link")[-1]
    for net in distinct(data["times"], "net"):
        for ranks in distinct(data["times"], "ranks"):
            rows = select(data["times"], net=net, ranks=ranks, link=link)
            if rows:
                steps = distinct(rows, "steps")
                show = partial(sent, parameters=data["parameters"][net])
                lines = by_contender(data, rows, show, steps)
                parts += [
                    f"### {net}, R = {ranks}, {link}",
                    grid(["contender", *(f"K = {k}" for k in steps)], lines),
                ]
    return "\n\n".join(parts)


def memory(data: Row) -> str:
    """Return peak memory beyond what the process had before the model was built."""
    if not data["peaks"]:
        return "Not measured."
    first = data["peaks"][0]
    steps = distinct(data["peaks"], "steps")

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
    ) + grid(
        ["contender", *(f"K = {k}" for k in steps)],
        by_contender(data, data["peaks"], peak, steps),
    )


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
