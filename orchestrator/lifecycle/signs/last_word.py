"""A rank's last word in its log, and who ended without one.

A rank that calls `os._exit(0)` looks from outside as one that is done. So a rank that no supervisor
of ours hears says in its log how it ended. SLURM starts a few lines of shell on the node of each
that has ended (srun's --task-epilog), which look for that. The first of an attempt that is without
it is written down: one small file, and only where something went wrong. Where losses are survived,
the first may be one; so all are.
"""

from __future__ import annotations

import re
from pathlib import Path

from orchestrator.lifecycle.topology import (
    BASE_ATTEMPT_VARIABLE,
    BATCH_COPY_VARIABLE,
    BATCH_PID_VARIABLE,
)
from orchestrator.rundir.files import read_end, read_text
from orchestrator.rundir.folder import RANKS_PER_FOLDER, RunDir
from orchestrator.start_from_copy import DISK, MEMORY, NAME

SCRIPT = "after_rank.sh"
MOST_BYTES = 1 << 20
LOOKED_AT_BYTES = 4096
OF_RANK = re.compile(r"rank-(\d+)\.log")
FOUND = re.compile(r"([0-9]{1,9}) ([\w.-]+)\n")


def say_last_word(attempt: int, word: str) -> None:
    """Into this rank's log, just before its process ends."""
    print(_line(attempt, word), flush=True)


def _line(attempt: int, word: str) -> str:
    return f"attempt {attempt} ended: {word}"


def ended_with(run: RunDir, attempt: int, word: str) -> list[int]:
    """The ranks whose last word of an attempt it was."""
    line = f"\n{_line(attempt, word)}\n".encode()
    logs = [(path, OF_RANK.fullmatch(path.name)) for path in run.all_logs()]
    return [int(of[1]) for path, of in logs if of and line in read_end(path, LOOKED_AT_BYTES)]


def has_last_word(log: Path, attempt: int) -> bool:
    """Whether a rank that has ended said how; False as well where it never wrote a log."""
    try:
        said = read_end(log, LOOKED_AT_BYTES)
    except FileNotFoundError:
        return False
    return re.search(rb"^attempt %d ended: " % attempt, said, re.MULTILINE) is not None


def wordless(run: RunDir, attempt: int) -> tuple[int, str] | None:
    """The first rank of an attempt that ended without a last word, and its node, if one did."""
    return next(iter(all_wordless(run, attempt)), None)


def all_wordless(run: RunDir, attempt: int) -> list[tuple[int, str]]:
    """Those of them that were written down, in the order of their ends."""
    try:
        said = read_text(run.wordless(attempt), at_most=MOST_BYTES)
    except FileNotFoundError:
        return []
    lines = [FOUND.fullmatch(line) for line in said.splitlines(keepends=True)]
    return [(int(found[1]), found[2]) for found in lines if found]


def after_rank(run: RunDir, quoted: str, *, every: bool = False) -> str:
    """The shell that the scheduler starts where a rank's process has ended.

    Args:
        quoted: the run's folder, as a shell takes it.
        every: each rank that ended without its last word is written down, not the first alone.
    """
    path, into = Path("$run") / run.attempts.name, ">>" if every else ">"
    return f"""\
#!/bin/sh
# Started by the scheduler on the node of each rank whose process has ended.
exec >/dev/null 2>&1
run={quoted} rank=$SLURM_PROCID
mine={NAME}-$(id -u) start=$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}-$SLURMD_NODENAME
if [ "${BATCH_COPY_VARIABLE}" != "$SLURMD_NODENAME:${{TMPDIR-}}" ] ||
    ! kill -0 "${BATCH_PID_VARIABLE}"; then  # else the batch script runs from it, and removes it
    for base in "${{TMPDIR:-{DISK}}}" {MEMORY} {DISK} "$run/{run.code.name}"; do
        for copy in "$base/$mine"-*-"$start"; do
            [ ! -d "$copy" ] || flock -n "$copy" rm -rf "$copy"  # by the last on this node
        done
    done
fi
attempt=$((${BASE_ATTEMPT_VARIABLE} + ${{SLURM_RESTART_COUNT:-0}}))
first=$((rank - rank % {RANKS_PER_FOLDER})) folder=$run/{run.logs.name}
[ "$first" = 0 ] || folder=$folder/$(printf 'ranks-%05d' "$first")
tail -c {LOOKED_AT_BYTES} "$folder/$(printf 'rank-%05d.log' "$rank")" |
    grep -qx "attempt $attempt ended: .*" && exit
set -C
umask 077
echo "$rank $SLURMD_NODENAME" {into}"{path}/$(printf '%03d' "$attempt")/{run.wordless(0).name}"
"""
