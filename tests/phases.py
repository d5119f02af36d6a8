"""The phases of the tests. A mark in a file says to which one it belongs:

    pytestmark = pytest.mark.whole_runs

- `slurm`: it needs the development cluster.
- `whole_runs`: it starts runs or measures times, and fails if it gets no processor for seconds.
- `long`: it takes longest, so it begins first, and `--phase=quick` leaves it out.
- `hydra`: it composes as Hydra does, so it runs under the next Hydra, too.

All others only compute. The mark is read as text: a module of another phase is not imported.
"""

import re
from pathlib import Path

PHASES = ("slurm", "whole_runs", "others", "quick", "hydra")
MARK = re.compile(r"\bpytest\.mark\.(slurm|whole_runs|long|hydra)\b")


def marks_of(path: Path) -> set[str]:
    """Return the marks of a test file that decide about its phase and order."""
    return set(MARK.findall(path.read_text("utf-8"))) if path.name.startswith("test_") else set()


def is_of_phase(path: Path, phase: str) -> bool:
    """Return whether a test file belongs to a phase."""
    marks = marks_of(path)
    if phase == "quick":
        return marks.isdisjoint({"slurm", "whole_runs", "long"})
    return phase in marks if phase != "others" else marks.isdisjoint({"slurm", "whole_runs"})
