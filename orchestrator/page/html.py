"""The page: one file that needs no network: its data, charts and their library are in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.page.charts import charts
from orchestrator.page.vega import COLOURS, theme

INSTALL = "pip install 'cluster-orchestrator[report]'"


def library() -> Any:
    """The module that has the drawing library. Raises `UsageError` with what to install."""
    try:
        import vl_convert
    except ModuleNotFoundError as error:
        raise UsageError(f"pages are drawn with vl-convert-python: {INSTALL}") from error
    return vl_convert


@cache
def _script() -> str:
    """Vega, Vega-Lite and vega-embed as one script, 0.9 MB."""
    return _in_script(library().javascript_bundle())


def _in_script(text: str) -> str:
    """`text` such that it cannot end the script element that it stands in."""
    return re.sub("</(script)", r"<\\/\1", text, flags=re.IGNORECASE).replace("<!--", "<\\!--")


def html_of(data: dict[str, Any], *, refresh_s: int | None = None) -> str:
    """The page as text.

    Args:
        refresh_s: seconds after which a browser asks for it again; None: never.

    Raises:
        UsageError: what draws it is not installed.
    """
    script = _script()
    import jinja2

    # Names and messages come from others: they are text, never markup.
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(
        files("orchestrator.page").joinpath("page.html").read_text("utf-8")
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
        refresh=refresh_s,
        data_json=_json(data),
        specs_json=_json(specs),
        library=script,
    )


def _variables(colours: Iterable[str]) -> str:
    return " ".join(f"--c{place}: {colour};" for place, colour in enumerate(colours, 1))


def _json(value: Any) -> str:
    """JSON that no HTML parser sees markup in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
