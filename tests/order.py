"""Which tests begin first: the files that take longest. And which of them hold no clock.

A file is one worker's, for its tests share what they have started. The two workers of tests/slurm
have a SLURM each; it has bounds on seconds, so what computes beside it gives way to it (`gate.py`).
"""

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


CALM = (
    *(f"tests/{name}" for name in ("benchmarks", "cli", "config", "docs")),
    *(f"tests/{name}" for name in ("health", "hostile", "jobs", "laws", "plan")),
    *(f"tests/{name}" for name in ("report", "rundir", "scheduler", "snapshot")),
    *(f"tests/engine/{name}" for name in ("test_common.py", "test_published_files.py", "torch")),
    *(f"tests/engine/mindspore/test_{name}.py" for name in ("engine", "groups", "rendezvous")),
    *("tests/callbacks", "tests/end_to_end/test_reproducible_runs.py"),
    "tests/third_party",
)
"""What computes, and would not notice if it stood still for a few seconds."""


def place_of(nodeid: str) -> int:
    """Where a test stands in the order; equal places keep theirs.

    >>> place_of("tests/plan/test_wire.py::test_a") == len(LONG)
    True
    """
    file = nodeid.partition("::")[0]
    return LONG.index(file) if file in LONG else len(LONG)
