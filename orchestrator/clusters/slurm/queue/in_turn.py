"""More points than the site lets one have in its queue (MaxSubmitJobs, of an association or a qos,
counts each element of an array): those that fit are queued, and the others follow in turn.

A run that waits its turn has a `turn.json`, which says as what it is to be queued: its scripts are
written by then, so that all that is left is one sbatch. A job that has ended does that for as many
as there is room for (`go_on`), on its own node, in its batch script's last command. So nobody has
to stay at a terminal, and no job is there that does nothing else.

One place of the room is left free at first, for a job still counts while it queues the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.clusters.slurm.queue.elements import ARRAYS, NUMBER
from orchestrator.clusters.slurm.queue.sbatch import BeyondLimit, adopt, queue
from orchestrator.clusters.slurm.trust import client_of
from orchestrator.errors import ClusterError, spans
from orchestrator.rundir.files import (
    make_folder,
    names_in,
    open_nofollow,
    read_json,
    read_text,
    write_atomically,
    write_json,
)
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.outcome import State, write_end
from orchestrator.rundir.status import RunStatus
from orchestrator.scheduler.client import SlurmClient
from orchestrator.scheduler.jobs import Job, mine
from orchestrator.units import plural

ARRAY = re.compile(r"^#SBATCH --array=.*$", re.MULTILINE)
# Figures of `scontrol show assoc_mgr`: MaxSubmitJobs=20(3), of which 3 are taken; N for no limit.
FIGURES = re.compile(r"(\w*SubmitJobs\w*)=(\d+)\((\d+)\)")
SPARE = 1  # of the room, for a job that queues the next one at its end
LOOK_S, SHORT_S, LONG_S = 2.0, 30.0, 600.0
REASON = "it is queued when another point of its sweep has ended: {}"
LEFT_OVER = "it was to be queued by another point's job, and none of its sweep is left: resume it"


@contextlib.contextmanager
def alone_at(sweep: Path) -> Generator[None]:
    """One at a time queues runs of a sweep, or takes their turns away, on whichever machine.

    Raises:
        ClusterError: what became of an earlier submission cannot be known yet.
    """
    folder = sweep / ARRAYS
    if not folder.is_dir():
        make_folder(folder)
    lock = open_nofollow(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if RunDir(sweep).submitting.exists():  # of a command, or a job, that was ended meanwhile
            adopt(RunDir(sweep))
        yield
    finally:
        os.close(lock)


def room(ask: Callable[[int], bool], most: int) -> int:
    """How many are taken at once of `most`, by asking for few numbers.

    >>> asked = []
    >>> room(lambda n: asked.append(n) or n <= 5, 100), asked
    (5, [100, 1, 2, 4, 8, 6, 5])
    """
    if most < 1 or ask(most):
        return max(0, most)
    least, beyond = 0, 1
    while beyond < most and ask(beyond):
        least, beyond = beyond, 2 * beyond
    beyond = min(beyond, most)
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if ask(middle) else (least, middle)
    return least


def room_for(client: SlurmClient, script: str, most: int) -> int:
    """How many elements of this script's array the scheduler would take now: sbatch itself is
    asked, which alone knows which limits hold (--test-only counts as a submission does).
    """

    def taken(count: int) -> bool:
        answer = client.ask("sbatch", "--test-only", f"--array=0-{count - 1}", text=script)
        return not BeyondLimit.found_in(answer.words)

    return room(taken, most)


def tightest(client: SlurmClient) -> str:
    """The limit that leaves least room, as SLURM names it, with what of it is taken, where the
    scheduler shows it.
    """
    answer = client.ask(
        "scontrol", "show", "assoc_mgr", f"users={getpass.getuser()}", "flags=assoc,qos"
    )
    found = [(int(m[2]) - int(m[3]), m[1], m[2], m[3]) for m in FIGURES.finditer(answer.out)]
    if answer.code or not found:
        return "the limit of submitted jobs"
    _, name, most, taken = min(found)
    return f"{name}={most}, of which {taken} are taken"


def turns(limit: str, first: int, total: int) -> str:
    """What becomes of points for which there is no room at once, in words.

    >>> turns("MaxSubmitJobs=5", 4, 16).partition(",")[0]
    'MaxSubmitJobs=5: 4 of 16 points are queued at first'
    """
    return (
        f"{limit}: {first} of {plural(total, 'point')} {'is' if first == 1 else 'are'} queued at "
        f"first, and {total - first} in their turn, each when another has ended; nobody has to "
        f"wait for that"
    )


def wait_turn(
    runs: Sequence[RunDir], script: Path, indices: dict[str, str], note: dict[str, Any]
) -> None:
    """Have runs wait their turns.

    Args:
        script: of the array that they are elements of.
        indices: in the array, by their folders' names.
        note: `attempt`, `slurm_conf`, `at_once`, and `limit`, which is told to people.
    """
    same = {
        **note,
        "kind": "slurm",
        "script": str(script),
        "path": os.environ.get("PYTHONPATH", ""),
    }
    for run in runs:
        write_json(run.turn, {**same, "index": indices[run.path.name]})


def waiting_in(sweep: Path) -> list[RunDir]:
    """The runs of a sweep that wait their turns, by their numbers."""
    names = sorted(filter(NUMBER.fullmatch, names_in(sweep)), key=int)
    return [run for name in names if (run := RunDir(sweep / name)).turn.exists()]


def take_away(runs: Sequence[RunDir]) -> list[RunDir]:
    """End runs that wait their turns; give those that did."""
    taken: list[RunDir] = []
    for sweep in {run.path.parent for run in runs if run.turn.exists()}:
        with alone_at(sweep):
            here = [r for r in runs if r.path.parent == sweep and r.turn.exists()]
            for run in here:
                write_end(run, State.STOPPED)
                run.turn.unlink()
            taken += here
    return taken


def queue_next(sweep: Path, *, spare: int = 0) -> int:
    """Queue as many of those that wait as there is room for; how many. For who is `alone_at` it.

    Args:
        spare: how much of the room is left free.

    Raises:
        ClusterError: the scheduler refuses them for another reason, or is silent.
    """
    done = 0
    while waiting := waiting_in(sweep):
        note = _turn(waiting[0])
        some = [waiting[0]]
        for run in waiting[1:]:
            if _turn(run)["script"] != note["script"]:
                break
            some.append(run)
        client = client_of(RunDir(sweep), note["slurm_conf"])
        text = read_text(Path(note["script"]))
        most = len(some)
        if note["at_once"]:
            most = min(most, note["at_once"] - len(under_way(sweep, mine(client, os.getuid()))))
        count = min(most, room_for(client, text, most + spare) - spare)
        if count < 1 or not _queue(sweep, some[:count], note, text):
            break
        done += count
    return done


def _turn(run: RunDir) -> dict[str, Any]:
    return read_json(run.turn) or {}


def _queue(sweep: Path, runs: Sequence[RunDir], note: dict[str, Any], text: str) -> bool:
    """One array of them; False where the room was taken by something else in this moment."""
    indices = {run.path.name: str(_turn(run)["index"]) for run in runs}
    script = next_name(sweep / ARRAYS).with_suffix(".sh")
    line = f"#SBATCH --array={','.join(spans(map(int, indices.values())))}"
    write_atomically(script, ARRAY.sub(line, text, count=1))
    try:
        queue(RunDir(sweep), script, note["attempt"], note["slurm_conf"], indices)
    except BeyondLimit:
        script.unlink()
        return False
    return True


def next_name(folder: Path) -> Path:
    """A name in a folder of numbered things that is not taken."""
    if not folder.is_dir():
        make_folder(folder)
    taken = [int(stem) for name in names_in(folder) if (stem := name.split(".")[0]).isdigit()]
    return folder / f"{max(taken, default=-1) + 1:03d}"


def under_way(sweep: Path, jobs: dict[str, Job]) -> list[str]:
    """The runs of a sweep whose jobs are queued or run, and that have not ended: they will queue
    others at their ends.
    """
    found: list[str] = []
    for name in filter(NUMBER.fullmatch, names_in(sweep)):
        run = RunDir(sweep / name)
        if run.handle.exists() and not run.result.exists():
            job = jobs.get(str((run.read_handle() or {}).get("job_id")))
            found += [name] if job is not None and job.alive else []
    return found


def go_on(sweep: Path) -> None:
    """At the end of a run's job: queue those whose turn it is.

    While there is no room, as this job still counts and so do others that are ending, it is waited
    for: shortly where others will come by here, too, and long where this is the last one.
    """
    began, said = time.monotonic(), False
    while waiting := waiting_in(sweep):
        # What sbatch hands on is the environment as it was before this job's script added to it.
        os.environ["PYTHONPATH"] = str(_turn(waiting[0]).get("path", ""))
        with alone_at(sweep):
            done = queue_next(sweep)
            waiting = waiting_in(sweep)
        if done or not waiting:
            return
        client = client_of(RunDir(sweep), _turn(waiting[0]).get("slurm_conf"))
        others = under_way(sweep, mine(client, os.getuid()))
        if time.monotonic() - began > (SHORT_S if others else LONG_S):
            return
        if not said:
            print("waiting for room to queue the sweep's next point", flush=True)  # noqa: T201  # batch.log
            said = True
        time.sleep(LOOK_S)


def look_at_turns(runs: Sequence[RunDir], found: dict[Path, RunStatus]) -> Iterator[str]:
    """Where runs stand that wait their turns; yields what could not be asked."""
    for sweep in {run.path.parent for run in runs}:
        here = [run for run in runs if run.path.parent == sweep]
        note = _turn(here[0])
        state, reason = "pending", REASON.format(note.get("limit", ""))
        try:
            if not under_way(sweep, mine(client_of(here[0], note["slurm_conf"]), os.getuid())):
                state, reason = "lost", LEFT_OVER
        except ClusterError as error:
            state, reason = "unknown", str(error)
            yield str(error)
        for run in here:
            found[run.path] = replace(found[run.path], state=state, reason=reason)


def refusal(client: SlurmClient, script: str, wanted: int) -> str | None:
    """Why a sweep of so many cannot even be queued in turns; None where it can."""
    found = room_for(client, script, min(2, wanted))
    if found >= min(2, wanted):
        return None
    return (
        f"{tightest(client)}: {wanted} points cannot even be queued in turn, which needs room "
        f"for 2 jobs, for one still counts while it queues the next. Wait until others of yours "
        f"have ended; or have one job run the points one after another: salloc, then the same line "
        f"with cluster.allocation=current"
    )
