"""Charts of single windows: a bar a rank, from its first micro-step to the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.page.timeline import PARTS
from orchestrator.page.vega import ROW, Chart, chart_of, spec_of

SHADES = ("compute", "optimizer", "other", "waiting for others", "reduction")  # as elsewhere
KEY = {
    "lines": [{"name": p, "dash": "", "colour": SHADES.index(p) + 1} for p in PARTS],
    "course": "",
}
TITLES = {"typical": "a typical update", "slowest": "the slowest update"}


def window_charts(run: Mapping[str, Any]) -> list[Chart]:
    """A chart for each window of which all ranks' times are known, no window twice."""
    windows = {window["update"]: window for window in run["timeline"]}
    return [_chart(window) for window in windows.values()]


def _chart(window: Mapping[str, Any]) -> Chart:
    values = [value for rank in window["ranks"] for value in _segments(rank)]
    names = [rank["name"] for rank in window["ranks"]]
    spec = spec_of(
        values,
        height=ROW * len(names) * (1 if len(names) <= 16 else 0.6),
        mark={"type": "bar", "height": {"band": 0.8}},
        encoding={
            "y": {"field": "rank", "type": "nominal", "sort": names,
                  "axis": {"title": None, "labelLimit": 130}},
            "x": {"field": "from", "type": "quantitative", "title": "seconds"},
            "x2": {"field": "to"},
            "color": {"field": "part", "type": "nominal", "scale": {"domain": list(SHADES)}},
            "tooltip": [{"field": "rank"}, {"field": "part"},
                        {"field": "seconds", "format": ".4g"}],
        },
    )  # fmt: skip
    kind = TITLES.get(window["kind"], f"the {window['kind']} update")
    shown, of = len(names), window["of_ranks"]
    title = f"Ranks in {kind}, {window['update']}" + f": {shown} of {of}" * (shown < of)
    return chart_of(f"ranks-{window['kind']}", title, spec, _says(window), KEY)


def _segments(rank: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    at = rank["begins_s"]
    for part, seconds in rank["seconds"].items():
        yield {"rank": rank["name"], "part": part, "seconds": seconds, "from": at,
               "to": at + seconds}  # fmt: skip
        at += seconds


def _says(window: Mapping[str, Any]) -> str:
    """In words: who came last, and for how long the others waited at the most."""
    waits = {rank["name"]: rank["seconds"]["waiting for others"] for rank in window["ranks"]}
    last = min(waits, key=waits.__getitem__)
    return f"{last} came last; others waited up to {max(waits.values()):.3g} s for it"
