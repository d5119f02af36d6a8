"""What charts are made of: colours, Vega's configuration, and a chart as a value.

Colours are after Okabe and Ito, whom colour-blind people can tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#A2568A", "#9A6A00", "#3A3A3A"),
    "dark": ("#56B4E9", "#F08A4B", "#3CC79A", "#E3A3C8", "#E6B800", "#D0D0D0"),
}
INK = {"light": ("#1b1f24", "#d5dae0"), "dark": ("#e6e9ed", "#3a424c")}  # text, lines
ROW = 26  # pixels of a bar
Chart = dict[str, Any]


def theme(shade: str) -> dict[str, Any]:
    """Vega's configuration for `light` or `dark`."""
    ink, line = INK[shade]
    text = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12}
    return {
        "background": None,
        "font": "system-ui, sans-serif",
        "view": {"stroke": None},
        "axis": {**text, "gridColor": line, "domainColor": line, "tickColor": line,
                 "titleFontWeight": "normal", "tickCount": 5, "labelOverlap": "greedy",
                 "labelSeparation": 6},
        "legend": {"disable": True},  # the page has its own, which breaks its lines on a phone
        "mark": {"color": COLOURS[shade][0]},
        "range": {"category": list(COLOURS[shade])},
    }  # fmt: skip


def spec_of(values: Sequence[Any], **rest: Any) -> dict[str, Any]:
    """A chart of these values, as wide as its place on the page."""
    return {
        "width": "container", "height": 240, "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": values}, **rest,
    }  # fmt: skip


def chart_of(
    name: str, title: str, spec: dict[str, Any], says: str, key: Mapping[str, Any] | None = None
) -> Chart:
    """A chart: `says` for who cannot see it, `key`: names of its colours and dashes."""
    return {
        "id": name,
        "title": title,
        "says": says,
        "spec": spec,
        "key": key or {"lines": [], "course": ""},
    }
