"""`report`: a page of a run or a sweep, and other formats."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFolderError, UsageError
from orchestrator.report_page.charts import COLOURS, charts, theme
from orchestrator.report_page.data import data_of
from orchestrator.rundir.files import write_atomically


@cache
def _script() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script of 0.9 MB that cannot end its element.

    Raises:
        UsageError: the library that has them is not installed.
    """
    try:
        import vl_convert
    except ModuleNotFoundError as error:
        raise UsageError(
            "pages are drawn with vl-convert-python: pip install 'vl-convert-python>=1.9' jinja2"
        ) from error
    library: Any = vl_convert  # its types ask for an argument that has a default
    bundle = re.sub("</(script)", r"<\\/\1", library.javascript_bundle(), flags=re.IGNORECASE)
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
        files("orchestrator.report_page").joinpath("page.html").read_text("utf-8")
    )
    drawn = charts(data)
    specs = {
        "charts": [{"id": chart["id"], "spec": chart["spec"]} for chart in drawn],
        "themes": {shade: theme(shade) for shade in ("light", "dark")},
    }
    variables = {
        shade: " ".join(f"--c{index}: {colour};" for index, colour in enumerate(colours, 1))
        for shade, colours in COLOURS.items()
    }
    return template.render(
        data=data,
        charts=drawn,
        colours=variables,
        data_json=_json(data),
        specs_json=_json(specs),
        library=script,
    )


def _json(value: Any) -> str:
    """Return JSON in which no HTML parser sees markup."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def json_of(data: Mapping[str, Any]) -> str:
    """Return everything, as the page has it."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


FORMULA = re.compile(r"[=@]|[+-](?!(\d+\.?|\d*\.\d+)(e[+-]?\d+)?$)", re.IGNORECASE)


def csv_of(data: Mapping[str, Any]) -> str:
    """Return a line for each run: what varies, how it ended, then raw figures (loss, seconds,
    bytes, counts).
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
    """Return text that no spreadsheet takes for a formula. Numbers stay numbers.

    >>> _inert("=1+1"), _inert(-1), _inert("-1e-3"), _inert("-x"), _inert("adam")
    ("'=1+1", -1, '-1e-3', "'-x", 'adam')
    """
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


FORMATS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "html": html_of,
    "csv": csv_of,
    "json": json_of,
}


def write_report(
    path: Path, form: str, output: Path | None, others: Sequence[Path] = ()
) -> Path | None:
    """Write the report of a run or a sweep: whole or not at all, and for its owner alone.

    Args:
        output: by default a page is written into the folder, or if there are `others`, which are
            on the same page, into the working folder.

    Returns:
        The file; None where it was printed.

    Raises:
        UsageError: no such format, or the page needs a package that is not installed.
        RunFolderError: there is no run, or the file cannot be written.
    """
    if form not in FORMATS:
        raise UsageError(f"--format={form}: choose one of {', '.join(FORMATS)}")
    content = FORMATS[form](data_of(path, *others))
    if output is None and form != "html":
        sys.stdout.write(content)
        return None
    target = output or (Path.cwd() if others else path) / "report.html"
    try:
        write_atomically(target, content)
    except OSError as error:
        hint = "" if output else "; name another file with --output"
        raise RunFolderError(f"{target} cannot be written: {error.strerror}{hint}") from error
    return target
