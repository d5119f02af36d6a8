"""How to talk to the person: where to, and how much."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """-v, -q, and where."""

    console: Console
    verbose: bool = False
    quiet: bool = False
