"""`report`: a page of a run or a sweep, and other formats."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.errors import RunFolderError, UsageError
from orchestrator.report.charts import COLOURS, charts, theme
from orchestrator.report.page_data import data_of, facts_of
from orchestrator.report.terminal import say
from orchestrator.rundir.files import write_atomically

INSTALL = "pip install 'cluster-orchestrator[report]'"


def library() -> Any:
    """Import the drawing library. Raises `UsageError` with what to install."""
    try:
        import vl_convert
    except ModuleNotFoundError as error:
        raise UsageError(f"pages are drawn with vl-convert-python: {INSTALL}") from error
    return vl_convert


@cache
def _script() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script of 0.9 MB that cannot end its element."""
    bundle = library().javascript_bundle()
    bundle = re.sub("</(script)", r"<\\/\1", bundle, flags=re.IGNORECASE)
    return bundle.replace("<!--", "<\\!--")


def html_of(data: dict[str, Any]) -> str:
    """Return the page as text. Raises `UsageError` if what draws it is not installed."""
    script = _script()
    import jinja2

    # Names and messages come from others: they are text, never markup.
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(
        files("orchestrator.report").joinpath("page.html").read_text("utf-8")
    )
    drawn = charts(data)
    specs = {
        "charts": [{"id": chart["id"], "spec": chart["spec"]} for chart in drawn],
        "themes": {shade: theme(shade) for shade in ("light", "dark")},
    }
    return template.render(
        data=data,
        charts=drawn,
        colours={shade: _variables(colours) for shade, colours in COLOURS.items()},
        data_json=_json(data),
        specs_json=_json(specs),
        library=script,
    )


def _variables(colours: Iterable[str]) -> str:
    return " ".join(f"--c{place}: {colour};" for place, colour in enumerate(colours, 1))


def _json(value: Any) -> str:
    """Return JSON in which no HTML parser sees markup."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


WIDTH = 640  # pixels of a chart in a picture, before `SCALE`
SCALE = 2.0
COLUMNS = 2


def json_of(data: Mapping[str, Any]) -> str:
    """Return everything, as the page has it."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def csv_of(data: Mapping[str, Any]) -> str:
    """Return a line for each run: what varies, how it ended, then raw figures (seconds, bytes,
    counts).
    """
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
    """Return the table of runs, the remarks, and the commands."""
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
    """Return all charts in one picture, on white. Raises `UsageError` if there are none."""
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


TO_A_FILE = ("html", "png")  # the others go to standard output unless a file is named


def write_report(path: Path, form: str, output: Path | None, console: Console) -> None:
    """Write the report of a run or a sweep: whole or not at all, and for its owner alone.

    Raises:
        UsageError: no such format, or it needs a package that is not installed.
        RunFolderError: there is no run, or the file cannot be written.
    """
    if form not in FORMATS:
        raise UsageError(f"--format={form}: choose one of {', '.join(FORMATS)}")
    made = FORMATS[form](data_of(facts_of(path)))
    if output is None and form not in TO_A_FILE:
        sys.stdout.write(str(made))
        return
    target = output or path / f"report.{form}"
    try:
        write_atomically(target, made)
    except OSError as error:
        hint = "" if output else "; name another file with --output"
        raise RunFolderError(f"{target} cannot be written: {error.strerror}{hint}") from error
    say(console, f"report: {target}")
