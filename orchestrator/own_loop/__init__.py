"""Our windows in somebody else's loop: the plan, exactness, agreed stops, the same bits afterwards.

The loop stays the user's: docs/how-to/library.md has one whole.
"""

from __future__ import annotations

from orchestrator.own_loop.beginning import windows_of
from orchestrator.own_loop.options import WindowOptions
from orchestrator.own_loop.windows import Window, Windows

__all__ = ["Window", "WindowOptions", "Windows", "windows_of"]
