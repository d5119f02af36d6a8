"""The time from a command's start until the last of its ranks has written a time stamp."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def last_stamp(
    command: list[str], folder: Path, *, ranks: int, timeout_s: float, env: Mapping[str, str]
) -> float:
    """Return seconds from starting `command` to the last rank's stamp, a file named by its time.

    Wait for the command to end, so that it does not take processor time from the next one.

    Raises:
        RuntimeError: another number of ranks wrote a stamp.
        TimeoutExpired: the command did not end in time.
    """
    stamps = folder / "stamps"
    shutil.rmtree(stamps, ignore_errors=True)
    stamps.mkdir()
    whole = {**env, "STAMPS": str(stamps), "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    began = time.time()
    output = folder / "output"  # not a pipe, which ranks that outlive a time-out would keep open
    with output.open("w", encoding="utf-8") as file:
        subprocess.run(
            command, env=whole, cwd=folder, stdout=file, stderr=file, timeout=timeout_s, check=False
        )
    found = [float(path.name) for path in stamps.iterdir()]
    if len(found) != ranks:
        text = output.read_text(encoding="utf-8")
        raise RuntimeError(f"{len(found)} of {ranks} ranks began: {' '.join(command)}\n{text}")
    return max(found) - began
