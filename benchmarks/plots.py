"""SVG plots of `peers`: ratio of time, bytes, loss over seconds. Text stays text, files small."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from benchmarks.measure import RESULTS, kept
from benchmarks.peers_tables import TARGETS, distinct, select

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
    """Write all plots, next to the results."""
    data = kept("peers")
    with plt.rc_context(_STYLE):
        _save(time(data), "peers-time")
        if any(row["bytes"] is not None for row in data["times"]):
            _save(sent(data), "peers-bytes")
        if data["losses"]:
            _save(losses(data), "peers-loss")


def _save(figure: Any, name: str) -> None:
    figure.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def _panels(rows: int, columns: int) -> tuple[Any, Any]:
    size = (2.6 * columns + 1.6, 2.2 * rows + 0.4)
    return plt.subplots(rows, columns, figsize=size, sharex="col", squeeze=False)


def _steps_axis(axes: Axes, steps: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_major_formatter(_PLAIN)
    axes.xaxis.set_minor_formatter(NullFormatter())


def _legend(figure: Any, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)


def time(data: Row) -> Any:
    """Plot the ratio of an update's seconds to the reference's over K; quartiles as bands."""
    nets, places = distinct(data["times"], "net"), []
    for link in distinct(data["times"], "link"):
        places += [(link, ranks) for ranks in distinct(data["times"], "ranks")]
    figure, panels = _panels(len(nets), len(places))
    for line, net in enumerate(nets):
        for column, (link, ranks) in enumerate(places):
            axes = panels[line][column]
            rows = select(data["times"], net=net, link=link, ranks=ranks)
            for name, style in _LINES.items():
                mine = select(rows, name=name)
                steps = [row["steps"] for row in mine]
                axes.plot(steps, [r["ratio"]["median"] for r in mine], label=name, ms=4, **style)
                low, high = ([r["ratio"][q] for r in mine] for q in ("q1", "q3"))
                axes.fill_between(steps, low, high, color=style["color"], alpha=0.12, lw=0)
            _steps_axis(axes, distinct(rows, "steps"))
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_locator(FixedLocator([0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8]))
            axes.yaxis.set_major_formatter(_PLAIN)
            axes.yaxis.set_minor_formatter(NullFormatter())
            if line == 0:
                axes.set_title(f"{link}, R = {ranks}", fontsize=9)
            if line == len(nets) - 1:
                axes.set_xlabel("micro-steps of an update, K")
        panels[line][0].set_ylabel(f"{net}\ntime / {data['reference']}")
    _legend(figure, panels[0][0])
    return figure


def sent(data: Row) -> Any:
    """Plot the bytes of an update relative to the floor over K."""
    nets = distinct(data["times"], "net")
    figure, panels = _panels(1, len(nets))
    for axes, net in zip(panels[0], nets, strict=True):
        floor = 4 * data["parameters"][net]  # 2(R-1)/R of it, for R = 2
        rows = [r for r in select(data["times"], net=net, ranks=2) if r["bytes"] is not None]
        rows = select(rows, link=rows[-1]["link"])
        for name, style in _LINES.items():
            mine = select(rows, name=name)
            sent_of = [row["bytes"] / floor for row in mine]
            axes.plot([row["steps"] for row in mine], sent_of, label=name, ms=4, **style)
        _steps_axis(axes, distinct(rows, "steps"))
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(FixedLocator([1, 1.5, 2, 4, 8, 16]))
        axes.yaxis.set_major_formatter(_PLAIN)
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{net}, R = 2", fontsize=9)
        axes.set_xlabel("micro-steps of an update, K")
    panels[0][0].set_ylabel("bytes sent / floor")
    _legend(figure, panels[0][0])
    return figure


def losses(data: Row) -> Any:
    """Plot the loss over seconds of training."""
    nets, links = distinct(data["losses"], "net"), distinct(data["losses"], "link")
    figure, panels = _panels(len(nets), len(links))
    for line, net in enumerate(nets):
        for axes, link in zip(panels[line], links, strict=True):
            for name, style in _LINES.items():
                for row in select(data["losses"], net=net, link=link, name=name):
                    passed = [sum(row["seconds"][: n + 1]) for n in range(len(row["seconds"]))]
                    plain = {**style, "marker": None}
                    axes.plot(passed, row["losses"], label=name, **plain)
            axes.axhline(TARGETS[net], color="#999999", lw=0.8, ls=":")
            axes.set_title(f"{net}, {link}", fontsize=9)
            axes.set_xlabel("seconds")
        panels[line][0].set_ylabel("loss")
    for axes in panels.flat:
        axes.tick_params(labelbottom=True)
    _legend(figure, panels[0][0])
    return figure
