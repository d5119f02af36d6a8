"""What several verbs take and print alike."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print data instead of a table.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="More detail; tracebacks.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Only errors.")]


def print_json(value: Any) -> None:
    """To standard output, as people and programs read it."""
    sys.stdout.write(json.dumps(value, indent=1) + "\n")
