"""Charts of a report as Vega-Lite specifications.

The page draws them with an embedded library; `--format png` uses the same library. Colours are
after Okabe and Ito; runs differ by colour and by dash.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.report.page_data import PARTS as WINDOW_PARTS

COLOURS = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#A2568A", "#9A6A00", "#3A3A3A"),
    "dark": ("#56B4E9", "#F08A4B", "#3CC79A", "#E3A3C8", "#E6B800", "#D0D0D0"),
}
INK = {"light": ("#1b1f24", "#d5dae0"), "dark": ("#e6e9ed", "#3a424c")}  # text, lines
ROW = 26  # pixels of a bar
Chart = dict[str, Any]


def theme(shade: str) -> dict[str, Any]:
    """Return Vega's configuration for `light` or `dark`."""
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
    """Return a chart of these values, as wide as its place on the page."""
    return {
        "width": "container", "height": 240, "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": values}, **rest,
    }  # fmt: skip


def chart_of(
    name: str, title: str, spec: dict[str, Any], says: str, key: Mapping[str, Any] | None = None
) -> Chart:
    """Return a chart. `says`: its alternative text; `key`: names of its colours and dashes."""
    return {
        "id": name,
        "title": title,
        "says": says,
        "spec": spec,
        "key": key or {"lines": [], "course": ""},
    }


SHADES = ("compute", "optimizer", "other", "waiting for others", "reduction")  # as elsewhere
KEY = {
    "lines": [{"name": p, "dash": "", "colour": SHADES.index(p) + 1} for p in WINDOW_PARTS],
    "course": "",
}
TITLES = {"typical": "a typical update", "slowest": "the slowest update"}


def window_charts(run: Mapping[str, Any]) -> list[Chart]:
    """Return a chart for each window with the times of all ranks, no window twice."""
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
    """Describe which rank came last, and for how long the others waited at most."""
    waits = {rank["name"]: rank["seconds"]["waiting for others"] for rank in window["ranks"]}
    last = min(waits, key=waits.__getitem__)
    return f"{last} came last; others waited up to {max(waits.values()):.3g} s for it"


DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [10, 4], [4, 2, 1, 2]]
PARTS = ("compute", "optimizer", "other", "wait")  # as they are stacked: by name
BARS = (
    ("seconds_per_update", "seconds per update"),
    ("samples_per_second", "samples per second"),
    ("peak_memory_bytes", "peak memory, MiB"),
    ("bytes_on_wire_per_update", "MiB on the wire per update"),
)
MIB = 1 << 20
MARKED = "#b87400"
MOST_TOLD = 8


def charts(data: Mapping[str, Any]) -> list[Chart]:
    """Return the page's charts: `id`, `title`, `says` (alternative text), `spec`, and `key` (names
    of its colours and dashes).
    """
    runs = [run for run in data["runs"] if run["series"]]
    if not runs:
        return []
    found = [
        _curve(runs, "update", "updates"),
        _curve(runs, "samples", "samples"),
        _curve(runs, "elapsed_s", "seconds since the run began to train"),
    ]
    found += [_evaluation(runs, name) for name in _evaluated(runs)]
    found.append(_time_of_updates(runs[0]) if len(runs) == 1 else _shares(runs))
    if not data["sweep"]:
        found += window_charts(runs[0])
    if data["sweep"]:
        found += [chart for key, title in BARS if (chart := _bars(runs, key, title))]
    elif runs[0]["memory"]:
        found.append(_memory(runs[0]))
    return found


def _by_run(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Colour and dash of each run, in their order; of very many runs a course of colours."""
    names = [run["name"] for run in runs]
    if len(names) == 1:
        return {}
    by: dict[str, Any] = {"field": "run", "type": "nominal"}
    if len(names) > len(DASHES):
        scheme = {"name": "viridis", "extent": [0.1, 0.8]}
        return {"color": {**by, "scale": {"domain": names, "scheme": scheme}}}
    return {
        "color": {**by, "scale": {"domain": names}},
        "strokeDash": {**by, "scale": {"domain": names, "range": DASHES[: len(names)]}},
    }


def _key(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the legend of a chart whose lines are runs."""
    names = [run["name"] for run in runs]
    if len(names) > len(DASHES):
        return {"lines": [], "course": f"from {names[0]} (dark) to {names[-1]} (bright)"}
    lines = [
        {"name": name, "dash": " ".join(map(str, dash)), "colour": place}
        for place, (name, dash) in enumerate(zip(names, DASHES, strict=False), 1)
    ]
    return {"lines": lines if len(names) > 1 else [], "course": ""}


PARTS_KEY = {
    "lines": [{"name": part, "dash": "", "colour": place} for place, part in enumerate(PARTS, 1)],
    "course": "",
}


def _curve(runs: Sequence[Mapping[str, Any]], x: str, title: str) -> Chart:
    values = [
        {"run": run["name"], "x": run["series"][x], "loss": run["series"]["loss"]} for run in runs
    ]
    line = {
        "mark": {"type": "line", "strokeWidth": 2, "point": len(runs[0]["series"]["loss"]) == 1},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": title},
            "y": {"field": "loss", "type": "quantitative", "title": "loss",
                  "scale": {"zero": False}},
            "tooltip": [{"field": "run"}, {"field": "x", "title": title}, {"field": "loss"}],
            **_by_run(runs),
        },
        "transform": [{"flatten": ["x", "loss"]}],
    }  # fmt: skip
    marks = [{**mark, "x": mark[x], "run": run["name"]} for run in runs for mark in run["marks"]]
    spec = spec_of(values, **({"layer": [line, *_rules(marks)]} if marks else line))
    told = "; ".join([_course(runs), *(_told(mark) for mark in marks[:MOST_TOLD])])
    return chart_of(f"loss-{x}", f"Loss against {title}", spec, told, _key(runs))


def _rules(marks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a line where a run continued, and one with a cross where it failed."""
    at: dict[str, Any] = {"x": {"field": "x", "type": "quantitative"}}
    told = [{"field": name} for name in ("run", "what", "why", "update")]
    rule = {"type": "rule", "strokeDash": [2, 3], "strokeWidth": 1.5, "color": MARKED}
    sign = {
        "type": "text",
        "fontSize": 15,
        "fontWeight": "bold",
        "color": MARKED,
        "baseline": "top",
    }
    letter = {"condition": {"test": "datum.what == 'failed'", "value": "✕"}, "value": "↻"}
    return [
        {"data": {"values": marks}, "mark": rule, "encoding": {**at, "tooltip": told}},
        {"data": {"values": marks}, "mark": sign,
         "encoding": {**at, "y": {"value": 0}, "text": letter, "tooltip": told}},
    ]  # fmt: skip


def _told(mark: Mapping[str, Any]) -> str:
    word = "failed after" if mark["what"] == "failed" else "went on at"
    return f"{mark['run']} {word} update {mark['update']}: {mark['why']}"


def _course(runs: Sequence[Mapping[str, Any]]) -> str:
    """Describe what a curve shows."""
    told: list[str] = []
    for run in runs[:8]:
        losses = [loss for loss in run["series"]["loss"] if loss is not None]
        if losses:
            told.append(f"{run['name']}: from {losses[0]:.4g} to {losses[-1]:.4g}")
    more = f"; and {len(runs) - 8} more runs" if len(runs) > 8 else ""
    return "; ".join(told) + more


def _evaluated(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run["evaluations"] if name != "update")
    return list(names)


def _evaluation(runs: Sequence[Mapping[str, Any]], name: str) -> Chart:
    having = [run for run in runs if name in run["evaluations"]]
    values = [
        {"run": r["name"], "update": r["evaluations"]["update"], "value": r["evaluations"][name]}
        for r in having
    ]
    spec = spec_of(
        values,
        transform=[{"flatten": ["update", "value"]}],
        mark={"type": "line", "strokeWidth": 2, "point": {"size": 40}},
        encoding={
            "x": {"field": "update", "type": "quantitative", "title": "updates"},
            "y": {"field": "value", "type": "quantitative", "title": f"held-out {name}",
                  "scale": {"zero": False}},
            "tooltip": [{"field": "run"}, {"field": "update"}, {"field": "value", "title": name}],
            **_by_run(having),
        },
    )  # fmt: skip
    told = "; ".join(f"{r['name']}: {r['evaluations'][name][-1]}" for r in having[:8])
    return chart_of(
        f"evaluation-{name}", f"Held-out {name}", spec, f"at the end: {told}", _key(having)
    )


def _parts() -> dict[str, Any]:
    return {"field": "part", "type": "nominal", "scale": {"domain": list(PARTS)}}


def _time_of_updates(run: Mapping[str, Any]) -> Chart:
    series = run["series"]
    values = [{"update": series["update"], **{p: series[f"{p}_s"] for p in PARTS}}]
    spec = spec_of(
        values,
        transform=[
            {"flatten": ["update", *PARTS]},
            {"fold": list(PARTS), "as": ["part", "seconds"]},
        ],
        mark={"type": "area", "interpolate": "step"},
        encoding={
            "x": {"field": "update", "type": "quantitative", "title": "updates"},
            "y": {"field": "seconds", "type": "quantitative", "title": "seconds of rank 0",
                  "stack": True},
            "color": _parts(),
            "order": {"field": "part"},
            "tooltip": [{"field": "update"}, {"field": "part"}, {"field": "seconds"}],
        },
    )  # fmt: skip
    shares = ", ".join(f"{name} {share:.0%}" for name, share in run["time_shares"].items())
    return chart_of("time-of-updates", "What updates spent their time on", spec, shares, PARTS_KEY)


def _shares(runs: Sequence[Mapping[str, Any]]) -> Chart:
    values = [
        {"run": run["name"], "part": part, "share": share}
        for run in runs
        for part, share in run["time_shares"].items()
    ]
    spec = spec_of(
        values,
        height=ROW * len(runs),
        mark="bar",
        encoding={
            "y": _names(runs),
            "x": {"field": "share", "type": "quantitative", "axis": {"format": "%"},
                  "scale": {"domain": [0, 1]},
                  "title": "share of time, rank 0"},
            "color": _parts(),
            "tooltip": [{"field": "run"}, {"field": "part"}, {"field": "share", "format": ".1%"}],
        },
    )  # fmt: skip
    told = "; ".join(
        f"{run['name']}: " + ", ".join(f"{n} {s:.0%}" for n, s in run["time_shares"].items())
        for run in runs[:8]
    )
    return chart_of("time-shares", "What updates spent their time on", spec, told, PARTS_KEY)


def _names(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    axis = {"title": None, "labelLimit": 130}
    return {"field": "run", "type": "nominal", "sort": [r["name"] for r in runs], "axis": axis}


def _bars(runs: Sequence[Mapping[str, Any]], key: str, title: str) -> Chart | None:
    scale = MIB if "MiB" in title else 1
    values = [
        {"run": run["name"], "value": figure["value"] / scale, "text": figure["text"]}
        for run in runs
        if (figure := run["figures"][key])["value"] is not None
    ]
    if not values:
        return None
    encoding: dict[str, Any] = {
        "y": _names(runs),
        "x": {"field": "value", "type": "quantitative", "title": title},
        "tooltip": [{"field": "run"}, {"field": "text", "title": title}],
    }
    spec = spec_of(values, height=ROW * len(runs), mark="bar", encoding=encoding)
    told = "; ".join(f"{value['run']}: {value['text']}" for value in values[:8])
    return chart_of(f"bars-{key}", title[0].upper() + title[1:], spec, told)


def _memory(run: Mapping[str, Any]) -> Chart:
    values = [{"part": part, "mib": size / MIB} for part, size in run["memory"].items()]
    spec = spec_of(
        values,
        height=ROW * len(values),
        mark="bar",
        encoding={
            "y": {"field": "part", "type": "nominal", "sort": None, "axis": {"title": None}},
            "x": {"field": "mib", "type": "quantitative", "title": "MiB of the largest rank"},
            "tooltip": [{"field": "part"}, {"field": "mib", "format": ".1f"}],
        },
    )
    told = "; ".join(f"{value['part']}: {value['mib']:.1f} MiB" for value in values)
    return chart_of("memory", "Memory that the training itself holds", spec, told)
