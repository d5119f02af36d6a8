"""How to talk to the person: where to, and how much."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console

from orchestrator.report.terminal import say


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """-v, -q, and where."""

    console: Console
    verbose: bool = False
    quiet: bool = False

    def foretell(self, warnings: Iterable[str], words: str) -> None:
        """Of a run that is about to begin; `words` are no warning."""
        for sentence in () if self.quiet else warnings:
            say(self.console, f"warning: {sentence}", "yellow")
        if words and not self.quiet:
            say(self.console, words, "dim", prose=True)
