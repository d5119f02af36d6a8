"""What kinds of values the files of a run folder hold, checked when one is read.

Only what readers rely on is told here; other keys are let through, so that files can grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.errors import RunFolderError

Shape = Mapping[str, Any]

NUMBER = (int, float)
MAYBE_NUMBER = (int, float, type(None))
TEXT = (str,)
MAYBE_TEXT = (str, type(None))
WHOLE = (int,)
MAYBE_WHOLE = (int, type(None))
TABLE = (dict,)
LIST = (list,)
NUMBERS = [NUMBER]  # a list of them

RESUMES: Shape = {"asked!": [{"attempt!": WHOLE}]}
STATES = ("finished", "stopped", "failed")
TRIAL_STATES = ("complete", "pruned", "failed", "open")
CULPRIT: Shape = {
    "rank": MAYBE_WHOLE, "node": TEXT, "cause": TEXT, "log_tail": LIST,
}  # fmt: skip
RESTART: Shape = {"attempt!": WHOLE, "why!": TEXT, "resumed_from!": WHOLE, "lost_updates!": WHOLE}
SURVIVED: Shape = {
    "generation!": WHOLE, "gone!": LIST, "ranks!": WHOLE, "nodes": WHOLE, "seconds!": NUMBER,
    "lost_updates": WHOLE, "redone": WHOLE,
}  # fmt: skip
JOINED: Shape = {
    "generation!": WHOLE, "came!": LIST, "ranks!": WHOLE, "nodes": WHOLE, "seconds!": NUMBER,
}  # fmt: skip
SHAPES: dict[str, Shape] = {
    "result.json": {
        "state!": STATES, "updates!": WHOLE, "samples": WHOLE, "loss": MAYBE_NUMBER,
        "metrics": TABLE, "weights_sha256": MAYBE_TEXT, "peak_memory_bytes": LIST, "memory": TABLE,
        "collectives": MAYBE_WHOLE, "bytes_on_wire": MAYBE_WHOLE, "seconds": NUMBER,
        "planned_updates": MAYBE_WHOLE, "planned_collectives_per_update": MAYBE_WHOLE,
        "culprit?": CULPRIT, "restarts": [RESTART], "why": TEXT, "survived": [SURVIVED],
        "joined": [JOINED],
    },
    "plan.json": {
        "updates": MAYBE_WHOLE, "nodes": WHOLE, "ranks": WHOLE, "dataset_samples": MAYBE_WHOLE,
        "micro_steps": WHOLE, "global_batch": WHOLE, "micro_batches": LIST,
    },
    "submission.json": {"cluster": TEXT, "command": LIST, "overrides": LIST, "folder": TEXT,
                        "grace_s": MAYBE_NUMBER},
    "handle.json": {"kind": TEXT, "job_id!": TEXT, "attempt": WHOLE, "slurm_conf": MAYBE_TEXT,
                    "pack": {"script!": TEXT, "runs!": LIST}},
    "submitting.json": {"kind!": TEXT, "script!": TEXT, "attempt!": WHOLE, "before!": TEXT,
                        "slurm_conf!": MAYBE_TEXT, "elements!": TABLE, "time!": NUMBER},
    "restart.json": RESTART,
    "pruned.json": {"why!": TEXT},
    "search.json": {
        "objective!": TEXT, "maximize!": (bool,), "wanted!": WHOLE, "best!": MAYBE_WHOLE,
        "line!": {"overrides!": [TEXT], "config_dir!": MAYBE_TEXT, "config_name!": TEXT,
                  "folder!": TEXT},
        "trials!": [
            {"number!": WHOLE, "state!": TRIAL_STATES, "value!": MAYBE_NUMBER, "point!": [TEXT],
             "folder!": MAYBE_TEXT, "same_as!": MAYBE_WHOLE, "why!": MAYBE_TEXT},
        ],
    },
    "program.json": {"seconds!": NUMBER},
    "timeline.json": {"windows!": [
        {"kind!": TEXT, "update!": WHOLE, "compute_s!": NUMBERS, "wait_s!": NUMBERS,
         "optimizer_s!": NUMBERS, "update_s!": NUMBERS},
    ]},
    "departure.json": {"why!": TEXT, "node": TEXT, "updates": MAYBE_WHOLE, "failed?": TABLE},
    "environment.json": {"processor": MAYBE_TEXT, "framework": TABLE, "packages": TABLE},
    "state.json": {
        "updates!": WHOLE, "samples!": WHOLE, "files!": TABLE, "extra!": TABLE, "run": MAYBE_TEXT,
        "bytes": TABLE,
    },
}  # fmt: skip

UPDATE: Shape = {
    "update!": WHOLE, "attempt": WHOLE, "epoch": WHOLE, "time": NUMBER, "loss": MAYBE_NUMBER,
    "learning_rate": NUMBER, "samples": WHOLE, "weight": NUMBER, "micro_steps": WHOLE,
    "collectives": WHOLE, "exchanges": WHOLE, "bytes_on_wire": WHOLE, "compute_s": NUMBER,
    "wait_s": NUMBER, "optimizer_s": NUMBER, "update_s": NUMBER, "peak_memory_bytes": WHOLE,
    "gradient_norm": MAYBE_NUMBER, "loss_scale": NUMBER, "metrics": TABLE, "evaluation?": TABLE,
    "restart": RESTART, "survived": SURVIVED, "joined": JOINED,
    "planned_collectives": MAYBE_WHOLE,
}  # fmt: skip


def fits_record(value: Any) -> bool:
    """Whether a line of metrics.jsonl holds what readers expect of one."""
    try:
        check_shape(Path("metrics.jsonl"), value, UPDATE)
    except RunFolderError:
        return False
    return True


def check_shape(path: Path, value: Any, shape: Shape) -> None:
    """Raises `RunFolderError` when a file's value is of another kind than readers expect.

    A key with `!` has to be there, one with `?` may be null instead.
    """
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is damaged: it is not a table")
    for told, kinds in shape.items():
        key = told.rstrip("!?")
        if key not in value:
            if told.endswith("!"):
                raise RunFolderError(f"{path} is damaged: it has no {key!r}")
        elif not (told.endswith("?") and value[key] is None):
            _check(path, key, value[key], kinds)


def _check(path: Path, key: str, value: Any, kinds: Any) -> None:
    if isinstance(kinds, Mapping):
        check_shape(path, value, kinds)
        return
    if isinstance(kinds, list):
        if not isinstance(value, list):
            raise RunFolderError(f"{path} is damaged: {key!r} is not a list")
        for entry in value:
            _check(path, key, entry, kinds[0])
        return
    fits = value in kinds if isinstance(kinds[0], str) else isinstance(value, kinds)
    if not fits or (isinstance(value, bool) and bool not in kinds):
        raise RunFolderError(f"{path} is damaged: {key!r} is {_short(value)}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
