"""The order of test files, and those that measure no times.

A file belongs to one worker because its tests share what they have started.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

LONG = tuple(
    f"tests/{name}.py"
    for name in (
        "slurm/test_interruptions",
        "slurm/test_sweeps",
        "slurm/test_node_loss",
        "slurm/test_submission",
        "slurm/test_verbs",
        "slurm/test_allocation",
        "slurm/test_mindspore",
        "end_to_end/test_programs",
        "engine/mindspore/test_runs",
        "audit/test_peers",
        "end_to_end/test_printed_commands",
        "audit/test_command",
        "end_to_end/test_last_words",
        "rehearse/test_rehearse",
        "engine/mindspore/test_engine",
        "docs/test_examples",
        "sentinel/test_sentinel",
        "replay/test_replay",
        "agent/test_local_nodes",
        "commands/test_new",
        "third_party/test_cluster_suite",
        "end_to_end/test_growth",
        "end_to_end/test_submitit",
        "engine/mindspore/test_groups",
        "client/test_frameworks",
        "client/test_in_runs",
        "end_to_end/test_failures",
        "docs/test_library",
        "engine/torch/test_loader",
        "end_to_end/test_runs",
        "end_to_end/test_restarts",
        "sweep/local/test_queue",
        "search/test_whole",
        "third_party/test_suites",
    )
)
"""The files that take longest, the longest first."""

_CALM = (
    *(
        f"tests/{name}"
        for name in ("audit", "benchmarks", "commands", "config", "docs", "health", "runs")
    ),
    *(
        f"tests/{name}"
        for name in ("jobs", "laws", "plan", "rehearse", "report", "report_page", "rundir")
    ),
    *(f"tests/{name}" for name in ("snapshot", "third_party", "engine/torch")),
    "tests/engine/test_common.py",
    *(f"tests/engine/mindspore/test_{name}.py" for name in ("engine", "groups")),
    "tests/client/test_frameworks.py",
)
CALM = tuple(path for path in _CALM if (ROOT / path).exists())
"""Tests that only compute, and pass although they get no processor for some seconds."""


def place_of(nodeid: str) -> int:
    """Return a test's place in the order; tests with equal places keep theirs.

    >>> place_of("tests/plan/test_wire.py::test_a") == len(LONG)
    True
    """
    file = nodeid.partition("::")[0]
    return LONG.index(file) if file in LONG else len(LONG)
