"""An SVG plot of `peers`: the ratio of time over K. Text stays text, the file small."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from benchmarks.measure import RESULTS, kept
from benchmarks.peers_tables import distinct, select

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "peers",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "figure.constrained_layout.use": True,
}
_LINES: dict[str, dict[str, Any]] = {  # colours that colour-blind people tell apart
    "ours": {"color": "#d55e00", "lw": 2.4, "marker": "o", "zorder": 5},
    "ours, reproducible": {"color": "#e69f00", "lw": 1.8, "marker": "s", "zorder": 4},
    "DDP + no_sync": {"color": "#000000", "lw": 1.4, "marker": "x"},
    "DDP plain": {"color": "#777777", "lw": 1.4, "marker": "v"},
    "Accelerate": {"color": "#0072b2", "lw": 1.4, "marker": "+"},
    "Lightning Fabric": {"color": "#56b4e9", "lw": 1.4, "marker": "d"},
    "FSDP2": {"color": "#009e73", "lw": 1.4, "marker": "^"},
}
Row = dict[str, Any]
_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def write() -> None:
    """Write the plot, next to the results."""
    with plt.rc_context(_STYLE):
        figure = time(kept("peers"))
        figure.savefig(RESULTS / "peers-time.svg", metadata={"Date": None})
        plt.close(figure)


def time(data: Row) -> Any:
    """Plot the ratio of an update's seconds to the reference's over K; quartiles as bands."""
    nets, columns = distinct(data["times"], "net"), []
    for link in distinct(data["times"], "link"):
        columns += [(link, ranks) for ranks in distinct(data["times"], "ranks")]
    figure, panels = plt.subplots(
        len(nets),
        len(columns),
        sharex="col",
        squeeze=False,
        figsize=(2.6 * len(columns) + 1.6, 2.2 * len(nets) + 0.4),
    )
    for line, net in enumerate(nets):
        for column, (link, ranks) in enumerate(columns):
            axes = panels[line][column]
            rows = select(data["times"], net=net, link=link, ranks=ranks)
            for name, style in _LINES.items():
                mine = select(rows, name=name)
                steps = [row["steps"] for row in mine]
                axes.plot(steps, [r["ratio"]["median"] for r in mine], label=name, ms=4, **style)
                low, high = ([r["ratio"][q] for r in mine] for q in ("q1", "q3"))
                axes.fill_between(steps, low, high, color=style["color"], alpha=0.12, lw=0)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(distinct(rows, "steps")))
            axes.xaxis.set_major_formatter(_PLAIN)
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_locator(FixedLocator([0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8]))
            axes.yaxis.set_major_formatter(_PLAIN)
            axes.yaxis.set_minor_formatter(NullFormatter())
            if line == 0:
                axes.set_title(f"{link}, R = {ranks}", fontsize=9)
            if line == len(nets) - 1:
                axes.set_xlabel("micro-steps of an update, K")
        panels[line][0].set_ylabel(f"{net}\ntime / {data['reference']}")
    lines = panels[0][0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside right center", frameon=False)
    return figure
