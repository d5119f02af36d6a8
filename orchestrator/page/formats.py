"""The same data in the forms that other programs read: JSON, CSV, Markdown, and a picture."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.page.charts import charts
from orchestrator.page.html import html_of, library
from orchestrator.page.vega import theme

WIDTH = 640  # pixels of a chart in a picture, before `SCALE`
SCALE = 2.0
COLUMNS = 2


def json_of(data: Mapping[str, Any]) -> str:
    """Everything, as the page has it."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def csv_of(data: Mapping[str, Any]) -> str:
    """A line a run: what varies, how it ended, then raw figures (seconds, bytes, counts)."""
    keys = list(dict.fromkeys(key for run in data["runs"] for key in run["overrides"]))
    figures = [figure["key"] for figure in data["figures"]]
    text = io.StringIO()
    writer = csv.writer(text)
    names = [f"held_out_{name}" for name in data["metrics"]]
    writer.writerow(["point", "folder", *keys, "state", *figures, *names, "sha256"])
    for run in data["runs"]:
        values = [run["figures"][key]["value"] for key in figures]
        metrics = [run["metrics"].get(name, {}).get("value") for name in data["metrics"]]
        swept = [run["overrides"].get(key) for key in keys]
        row = [run["point"], run["folder"], *swept, run["state"], *values, *metrics, run["sha256"]]
        writer.writerow([_inert(value) for value in row])
    return text.getvalue()


def _inert(value: Any) -> Any:
    """Text that no spreadsheet takes for a formula.

    >>> _inert("=1+1"), _inert(-1), _inert("-x"), _inert("adam")
    ("'=1+1", -1, "'-x", 'adam')
    """
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def markdown_of(data: Mapping[str, Any]) -> str:
    """The table of runs, what is to be said of it, and the commands."""
    titles = [figure["title"] for figure in data["figures"]]
    head = ["no.", "run", "state", *titles, *data["metrics"], "weights differ by"]
    lines = [f"# {_plain(data['title'])}", "", _row(head), _row(["---"] * len(head))]
    for run in data["runs"]:
        figures = [run["figures"][figure["key"]]["text"] for figure in data["figures"]]
        metrics = [run["metrics"].get(name, {}).get("text", "-") for name in data["metrics"]]
        lines.append(
            _row([run["point"], run["name"], run["state"], *figures, *metrics, run["weights"]])
        )
    lines += ["", *(_plain(sentence) for sentence in data["sentences"])]
    lines += [f"{_plain(run['point'])}: {_plain(run['why'])}" for run in data["runs"] if run["why"]]
    for run in data["runs"]:
        lines += ["", f"{_plain(run['point'])}: {_plain(run['name'])}", "", f"    {run['command']}"]
    return "\n".join(lines) + "\n"


def _row(cells: list[Any]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(value: Any) -> str:
    r"""Text without what Markdown reads as markup.

    >>> _plain("a|b <i>*c*\n")
    'a\\|b &lt;i>\\*c\\* '
    """
    text = str(value).replace("\n", " ").replace("<", "&lt;")
    return "".join(f"\\{letter}" if letter in "\\|*_`[]" else letter for letter in text)


def png_of(data: Mapping[str, Any]) -> bytes:
    """All charts in one picture, on white. Raises `UsageError` when there is none to draw."""
    from orchestrator.errors import UsageError

    drawn = [
        {**chart["spec"], "title": chart["title"], "width": WIDTH, "autosize": "pad"}
        for chart in charts(data)
    ]
    if not drawn:
        raise UsageError("there is nothing to draw: no update has been made yet")
    config = {**theme("light"), "background": "white", "concat": {"columns": COLUMNS}}
    config["legend"] = {"orient": "top", "title": None}
    scales = {"color": "independent", "strokeDash": "independent"}
    whole = {"concat": drawn, "config": config, "resolve": {"scale": scales}}
    return library().vegalite_to_png(json.dumps(whole), scale=SCALE)


FORMATS: Mapping[str, Callable[[dict[str, Any]], str | bytes]] = {
    "html": html_of,
    "md": markdown_of,
    "csv": csv_of,
    "json": json_of,
    "png": png_of,
}
