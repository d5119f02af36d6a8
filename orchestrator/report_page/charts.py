"""Charts of a report as Vega-Lite specifications.

The page draws them with an embedded library. Colours are after Okabe and Ito; runs differ by colour
and by dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.units import BYTES, SECONDS, Units, format_bytes, format_seconds, unit_for

COLOURS = {
    "light": ("#0072B2", "#D55E00", "#009E73", "#A2568A", "#9A6A00", "#3A3A3A"),
    "dark": ("#56B4E9", "#F08A4B", "#3CC79A", "#E3A3C8", "#E6B800", "#D0D0D0"),
}
INK = {"light": ("#1b1f24", "#d5dae0"), "dark": ("#e6e9ed", "#3a424c")}  # text, lines
MARKED = "#b87400"
ROW = 26  # pixels of a bar
MOST_DESCRIBED = 8  # runs, or marks, in the alternative text of a chart
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [10, 4], [4, 2, 1, 2]]
PARTS = ("compute", "optimizer", "other", "wait")  # stacked by name
COLOUR_OF_PARTS = {"field": "part", "type": "nominal", "scale": {"domain": list(PARTS)}}
NO_UNIT: Units = ((1.0, ""),)
BARS = (
    ("seconds_per_update", "time per update", SECONDS),
    ("samples_per_second", "samples per second", NO_UNIT),
    ("peak_memory_bytes", "peak memory", BYTES),
    ("bytes_on_wire_per_update", "bytes on the wire per update", BYTES),
)
NO_KEY: dict[str, Any] = {"lines": [], "course": ""}
KEY_OF_PARTS: dict[str, Any] = {
    "lines": [{"name": name, "dash": "", "colour": n} for n, name in enumerate(PARTS, 1)],
    "course": "",
}
WORK = {"work": 1, "wait": PARTS.index("wait") + 1}  # with their colours
Chart = dict[str, Any]
Runs = Sequence[Mapping[str, Any]]


def theme(shade: str) -> dict[str, Any]:
    """Return Vega's configuration for `light` or `dark`."""
    ink, line = INK[shade]
    text = {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "titleFontSize": 12}
    lines = {"gridColor": line, "domainColor": line, "tickColor": line, "tickCount": 5}
    labels = {"titleFontWeight": "normal", "labelOverlap": "greedy", "labelSeparation": 6}
    return {
        "background": None,
        "font": "system-ui, sans-serif",
        "view": {"stroke": None},
        "axis": {**text, **lines, **labels},
        "legend": {"disable": True},  # the page has its own, which breaks its lines on a phone
        "mark": {"color": COLOURS[shade][0]},
        "range": {"category": list(COLOURS[shade])},
    }


def charts(data: Mapping[str, Any]) -> list[Chart]:
    """Return the page's charts: `id`, `title`, `says` (alternative text), `spec`, and `key` (names
    of its colours and dashes).
    """
    runs = [run for run in data["runs"] if run["series"]]
    if not runs:
        return []
    page_charts = [
        _curve(runs, "update", "updates"),
        _curve(runs, "samples", "samples"),
        _curve(runs, "elapsed_s", "time since the run began to train", SECONDS),
    ]
    evaluated = dict.fromkeys(name for run in runs for name in run["evaluations"])
    page_charts += [_evaluation(runs, name) for name in evaluated if name != "update"]
    page_charts.append(_time_of_updates(runs[0]) if len(runs) == 1 else _shares(runs))
    if data["sweep"]:
        return page_charts + [chart for of in BARS if (chart := _bars(runs, *of))]
    if len(runs[0]["seconds_of_ranks"]) > 1:
        page_charts.append(_work_by_rank(runs[0]))
    return page_charts + ([_memory(runs[0])] if runs[0]["memory"] else [])


def _chart(
    name: str,
    title: str,
    says: str,
    values: Sequence[Any],
    key: Mapping[str, Any] = NO_KEY,
    **rest: Any,
) -> Chart:
    """Return a chart of these values, as wide as its place on the page."""
    fit = {"type": "fit-x", "contains": "padding"}
    spec = {"width": "container", "height": 240, "autosize": fit, "data": {"values": values}}
    return {"id": name, "title": title, "says": says, "spec": {**spec, **rest}, "key": key}


def _numbers(field: str, title: str, **rest: Any) -> dict[str, Any]:
    """Return an axis of numbers."""
    return {"field": field, "type": "quantitative", "title": title, **rest}


def _with_unit(title: str, unit: str) -> str:
    return f"{title} ({unit})" if unit else title


def _scaled(values: Sequence[float], size: float) -> Sequence[float]:
    """Return values in units of this size, without digits that they do not have."""
    return values if size == 1 else [float(f"{value / size:.6g}") for value in values]


def _names(field: str, names: Sequence[str] | None) -> dict[str, Any]:
    """Return an axis of names, in their order."""
    axis = {"title": None, "labelLimit": 130}
    return {"field": field, "type": "nominal", "sort": names, "axis": axis}


def _fields(*names: str, **formats: str) -> list[dict[str, Any]]:
    """Return a tooltip."""
    plain = [{"field": name} for name in names]
    return plain + [{"field": name, "format": text} for name, text in formats.items()]


def _by_run(runs: Runs) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return colour and dash of each run, in their order, and the legend; of very many runs a range
    of colours.
    """
    names = [run["name"] for run in runs]
    if len(names) == 1:
        return {}, NO_KEY
    by: dict[str, Any] = {"field": "run", "type": "nominal"}
    if len(names) > len(DASHES):
        scheme = {"name": "viridis", "extent": [0.1, 0.8]}
        course = f"from {names[0]} (dark) to {names[-1]} (bright)"
        colour = {**by, "scale": {"domain": names, "scheme": scheme}}
        return {"color": colour}, {"lines": [], "course": course}
    lines = [
        {"name": name, "dash": " ".join(map(str, dash)), "colour": number}
        for number, (name, dash) in enumerate(zip(names, DASHES, strict=False), 1)
    ]
    encoding = {
        "color": {**by, "scale": {"domain": names}},
        "strokeDash": {**by, "scale": {"domain": names, "range": DASHES[: len(names)]}},
    }
    return encoding, {"lines": lines, "course": ""}


def _curve(runs: Runs, x: str, title: str, units: Units = NO_UNIT) -> Chart:
    """Return the losses of all runs, with marks where runs continued and failed."""
    colours, key = _by_run(runs)
    size, unit = unit_for((place for run in runs for place in run["series"][x]), units)
    axis = _with_unit(title, unit)
    values = [
        {
            "run": run["name"],
            "x": _scaled(run["series"][x], size),
            "loss": run["series"]["loss"],
        }
        for run in runs
    ]
    line = {
        "mark": {"type": "line", "strokeWidth": 2, "point": len(runs[0]["series"]["loss"]) == 1},
        "encoding": {
            "x": _numbers("x", axis),
            "y": _numbers("loss", "loss", scale={"zero": False}),
            "tooltip": [{"field": "run"}, {"field": "x", "title": axis}, {"field": "loss"}],
            **colours,
        },
        "transform": [{"flatten": ["x", "loss"]}],
    }
    marks = [
        {**mark, "x": mark[x] / size, "run": run["name"]} for run in runs for mark in run["marks"]
    ]
    courses: list[str] = []
    for run in runs[:MOST_DESCRIBED]:
        losses = [loss for loss in run["series"]["loss"] if loss is not None]
        if losses:
            courses.append(f"{run['name']}: from {losses[0]:.4g} to {losses[-1]:.4g}")
    if len(runs) > MOST_DESCRIBED:
        courses.append(f"and {len(runs) - MOST_DESCRIBED} more runs")
    for mark in marks[:MOST_DESCRIBED]:
        verb = "failed after" if mark["what"] == "failed" else "went on at"
        courses.append(f"{mark['run']} {verb} update {mark['update']}: {mark['why']}")
    layers = {"layer": [line, *_rules(marks)]} if marks else line
    return _chart(f"loss-{x}", f"Loss against {title}", "; ".join(courses), values, key, **layers)


def _rules(marks: Runs) -> list[dict[str, Any]]:
    """Return a line with an arrow where a run continued, and one with a cross where it failed."""
    data, at = {"values": marks}, {"x": {"field": "x", "type": "quantitative"}}
    tooltip = _fields("run", "what", "why", "update")
    rule = {"type": "rule", "strokeDash": [2, 3], "strokeWidth": 1.5, "color": MARKED}
    bold = {"fontSize": 15, "fontWeight": "bold"}
    sign = {"type": "text", **bold, "color": MARKED, "baseline": "top"}
    letter = {"condition": {"test": "datum.what == 'failed'", "value": "✕"}, "value": "↻"}
    on_top = {**at, "y": {"value": 0}, "text": letter, "tooltip": tooltip}
    return [
        {"data": data, "mark": rule, "encoding": {**at, "tooltip": tooltip}},
        {"data": data, "mark": sign, "encoding": on_top},
    ]


def _evaluation(runs: Runs, name: str) -> Chart:
    having = [run for run in runs if name in run["evaluations"]]
    values = [
        {"run": r["name"], "update": r["evaluations"]["update"], "value": r["evaluations"][name]}
        for r in having
    ]
    colours, key = _by_run(having)
    ends = (f"{r['name']}: {r['evaluations'][name][-1]}" for r in having[:MOST_DESCRIBED])
    return _chart(
        f"evaluation-{name}",
        f"Held-out {name}",
        f"at the end: {'; '.join(ends)}",
        values,
        key,
        transform=[{"flatten": ["update", "value"]}],
        mark={"type": "line", "strokeWidth": 2, "point": {"size": 40}},
        encoding={
            "x": _numbers("update", "updates"),
            "y": _numbers("value", f"held-out {name}", scale={"zero": False}),
            "tooltip": [*_fields("run", "update"), {"field": "value", "title": name}],
            **colours,
        },
    )


def _time_of_updates(run: Mapping[str, Any]) -> Chart:
    series = run["series"]
    seconds = [series[f"{part}_s"] for part in PARTS]
    size, unit = unit_for(map(sum, zip(*seconds, strict=True)), SECONDS)
    columns = {part: _scaled(column, size) for part, column in zip(PARTS, seconds, strict=True)}
    return _chart(
        "time-of-updates",
        "What updates spent their time on",
        _shares_of(run),
        [{"update": series["update"], **columns}],
        KEY_OF_PARTS,
        transform=[
            {"flatten": ["update", *PARTS]},
            {"fold": list(PARTS), "as": ["part", "time"]},
        ],
        mark={"type": "area", "interpolate": "step"},
        encoding={
            "x": _numbers("update", "updates"),
            "y": _numbers("time", f"time of rank 0 ({unit})", stack=True),
            "color": COLOUR_OF_PARTS,
            "order": {"field": "part"},
            "tooltip": [*_fields("update", "part"), {"field": "time", "title": unit}],
        },
    )


def _shares_of(run: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in run["time_shares"].items())


def _shares(runs: Runs) -> Chart:
    values = [
        {"run": run["name"], "part": part, "share": share}
        for run in runs
        for part, share in run["time_shares"].items()
    ]
    axis = {"axis": {"format": "%"}, "scale": {"domain": [0, 1]}}
    return _chart(
        "time-shares",
        "What updates spent their time on",
        "; ".join(f"{run['name']}: {_shares_of(run)}" for run in runs[:MOST_DESCRIBED]),
        values,
        KEY_OF_PARTS,
        height=ROW * len(runs),
        mark="bar",
        encoding={
            "y": _names("run", [run["name"] for run in runs]),
            "x": _numbers("share", "share of time, rank 0", **axis),
            "color": COLOUR_OF_PARTS,
            "tooltip": _fields("run", "part", share=".1%"),
        },
    )


def _work_by_rank(run: Mapping[str, Any]) -> Chart:
    """Return how long each rank worked in updates, and waited for others."""
    rows = run["seconds_of_ranks"]
    least, most = rows[0], rows[-1]
    size, unit = unit_for((row["work"] + row["wait"] for row in rows), SECONDS)
    values = [
        {
            "rank": f"rank {row['rank']}",
            "part": part,
            "time": row[part] / size,
            "text": format_seconds(row[part]),
        }
        for row in rows
        for part in ("work", "wait")
    ]
    hidden = (
        "" if len(rows) == run["plan"]["ranks"]["value"] else ": those that wait least, and most"
    )
    return _chart(
        "work-by-rank",
        f"Work and waiting by rank{hidden}",
        f"rank {least['rank']} waits least: {format_seconds(least['wait'])} beside "
        f"{format_seconds(least['work'])} of work; rank {most['rank']} most: "
        f"{format_seconds(most['wait'])} beside {format_seconds(most['work'])}",
        values,
        {"lines": [{"name": n, "dash": "", "colour": c} for n, c in WORK.items()], "course": ""},
        height=ROW * len(rows),
        mark="bar",
        encoding={
            "y": _names("rank", [f"rank {row['rank']}" for row in rows]),
            "x": _numbers("time", f"time in updates of the last attempt ({unit})"),
            "color": {**COLOUR_OF_PARTS, "scale": {"domain": ["work", *PARTS[1:]]}},
            "tooltip": [*_fields("rank", "part"), {"field": "text", "title": "time"}],
        },
    )


def _bars(runs: Runs, key: str, title: str, units: Units) -> Chart | None:
    figures = {run["name"]: run["figures"][key] for run in runs}
    figures = {name: figure for name, figure in figures.items() if figure["value"] is not None}
    if not figures:
        return None
    size, unit = unit_for((figure["value"] for figure in figures.values()), units)
    values = [
        {"run": name, "value": figure["value"] / size, "text": figure["text"]}
        for name, figure in figures.items()
    ]
    return _chart(
        f"bars-{key}",
        title[0].upper() + title[1:],
        "; ".join(f"{value['run']}: {value['text']}" for value in values[:MOST_DESCRIBED]),
        values,
        height=ROW * len(runs),
        mark="bar",
        encoding={
            "y": _names("run", [run["name"] for run in runs]),
            "x": _numbers("value", _with_unit(title, unit)),
            "tooltip": [{"field": "run"}, {"field": "text", "title": title}],
        },
    )


def _memory(run: Mapping[str, Any]) -> Chart:
    size, unit = unit_for(run["memory"].values(), BYTES)
    values = [
        {"part": part, "memory": count / size, "text": format_bytes(count)}
        for part, count in run["memory"].items()
    ]
    return _chart(
        "memory",
        "Memory that the training itself holds",
        "; ".join(f"{value['part']}: {value['text']}" for value in values),
        values,
        height=ROW * len(values),
        mark="bar",
        encoding={
            "y": _names("part", None),
            "x": _numbers("memory", f"memory of the largest rank ({unit})"),
            "tooltip": [{"field": "part"}, {"field": "text", "title": "memory"}],
        },
    )
