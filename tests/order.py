"""Which tests one worker runs one after another, and what begins first: what lasts longest.

A file is one worker's, for its tests share what they have started. tests/slurm is two workers',
each with a SLURM of its own; it has bounds on seconds, so what computes beside it gives way to it
(`gate.py`).
"""

SLURM = "tests/slurm/"
LANE = tuple(f"{SLURM}test_{n}.py" for n in ("failures", "mindspore", "node_loss", "under_fire"))
"""As long as the other files of tests/slurm together."""

LONG = (
    "tests/engine/mindspore/test_runs.py",
    "tests/end_to_end/test_runs.py",
    "tests/engine/mindspore/comm/test_groups.py",
    "tests/end_to_end/test_failures.py",
    "tests/end_to_end/test_reproducible_runs.py",
    "tests/end_to_end/test_restarts.py",
    "tests/engine/mindspore/test_engine.py",
    "tests/end_to_end/test_last_words.py",
    "tests/end_to_end/test_bad_input.py",
    "tests/end_to_end/test_full_disk.py",
    "tests/docs/test_library.py",
    "tests/end_to_end/test_resume_overrides.py",
    "tests/end_to_end/test_control.py",
    "tests/third_party/test_suites.py",
)
"""The files that take longest, the longest first."""


CALM = (
    *(f"tests/{name}" for name in ("benchmarks", "cli", "compose", "config", "data", "docs")),
    *(f"tests/{name}" for name in ("doctor", "hostile", "jobs", "laws", "outcome", "page", "plan")),
    *(f"tests/{name}" for name in ("report", "run_folder", "scheduler", "snapshot")),
    *(f"tests/engine/{name}" for name in ("common", "mindspore/comm", "torch")),
    *("tests/engine/mindspore/test_engine.py", "tests/third_party", "tests/mutants"),
)
"""What computes, and would not notice if it stood still for a few seconds."""


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def unit_of(nodeid: str) -> str:
    """What goes to one worker together with this test: its file, or a half of tests/slurm.

    >>> unit_of("tests/plan/test_wire.py::test_a[1::2]")
    'tests/plan/test_wire.py'
    >>> unit_of("tests/slurm/test_verbs.py::test_b")
    'tests/slurm/ 2'
    """
    file = file_of(nodeid)
    if not file.startswith(SLURM):
        return file
    return f"{SLURM} {1 if file in LANE else 2}"


def place_of(nodeid: str) -> int:
    """Where a test stands in the order; equal places keep theirs."""
    file = file_of(nodeid)
    if file.startswith(SLURM):
        return 0 if file in LANE else 1
    return 2 + (LONG.index(file) if file in LONG else len(LONG))
