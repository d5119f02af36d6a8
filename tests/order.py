"""Which test files run first, and which of them measure no times.

A file belongs to one worker because its tests share what they have started.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LONG = (
    *(
        f"tests/slurm/test_{name}.py"
        for name in (
            "interruptions",
            "sweeps",
            "node_loss",
            "submission",
            "failures",
            "verbs",
            "allocation",
            "mindspore",
        )
    ),
    "tests/engine/mindspore/test_runs.py",
    "tests/end_to_end/test_runs.py",
    "tests/engine/mindspore/test_groups.py",
    "tests/end_to_end/test_failures.py",
    "tests/end_to_end/test_reproducible_runs.py",
    "tests/end_to_end/test_restarts.py",
    "tests/engine/mindspore/test_engine.py",
    "tests/end_to_end/test_last_words.py",
    "tests/end_to_end/test_bad_input.py",
    "tests/end_to_end/test_full_disk.py",
    "tests/docs/test_library.py",
    "tests/end_to_end/test_resumed_on_other_ranks.py",
    "tests/end_to_end/test_status_and_cancel.py",
    "tests/third_party/test_suites.py",
)
"""The files that take longest, the longest first."""

_CALM = (
    *(f"tests/{name}" for name in ("audit", "benchmarks", "cli", "config", "docs", "health")),
    *(f"tests/{name}" for name in ("jobs", "laws", "plan", "report", "rundir")),
    *(f"tests/{name}" for name in ("snapshot", "third_party", "engine/torch")),
    *(f"tests/engine/{name}" for name in ("test_common.py", "test_published_files.py")),
    *(f"tests/engine/mindspore/test_{name}.py" for name in ("engine", "groups", "rendezvous")),
    "tests/client/test_frameworks.py",
    "tests/end_to_end/test_reproducible_runs.py",
)
CALM = tuple(path for path in _CALM if (ROOT / path).exists())
"""Tests that only compute, and pass although they stand still for some seconds."""


def place_of(nodeid: str) -> int:
    """Return a test's place in the order; tests with equal places keep theirs.

    >>> place_of("tests/plan/test_wire.py::test_a") == len(LONG)
    True
    """
    file = nodeid.partition("::")[0]
    return LONG.index(file) if file in LONG else len(LONG)
