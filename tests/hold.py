"""Hold a run at chosen updates, so that a test injects its fault at a known point.

The test and the job share a folder. The test calls `hold_before`, waits with `wait_until_held`,
acts, and moves the hold on or calls `release`; after `request_stop` if it asks for a stop. The job
calls `wait_as_newcomer` when it is made, and `wait_at` in every micro-step.
"""

import json
import math
import os
import time
from pathlib import Path


def begin_held(run, update, *words, ranks=(0, 1)):
    """Start a run and wait until these ranks are held in the first micro-step of `update`."""
    from tests.helpers import begin  # not in the job

    hold = Hold(run.with_name("hold")).hold_before(update)
    process = begin(*words, f"run.dir={run}", hold.override)
    hold.wait_until_held(update, ranks)
    return process, hold


def request_stop(run, request, ranks=(0, 1)):
    """Make a request to stop, and wait until these ranks have received it. A hold may be released
    only then: a fast rank trains to its end while the request is on its way.
    """
    from tests.helpers import until  # not in the job

    def received():
        logs = (run / "logs" / f"rank-{rank:05d}.log" for rank in ranks)
        return [log.read_text().count("all ranks stop after the same update") for log in logs]

    earlier = received()  # of an attempt before
    request()

    def arrived():
        return all(now > before for now, before in zip(received(), earlier, strict=True))

    until(arrived, what=f"ranks {ranks} having received the request to stop")


class Hold:
    """A folder with the first update that may not begin yet, and one marker for each held rank."""

    def __init__(self, folder):
        self.folder = Path(str(folder).removeprefix("at:"))
        self._limit_file = self.folder / "first-held-update"

    @property
    def override(self):
        """Return the override that makes a run's job use this hold. With "at:" it is no path, so a
        sweep does not compare the folder's files, which change.
        """
        return f"job.hold=at:{self.folder}"

    def hold_before(self, update):
        """Let the updates below `update` run and hold every rank in the first micro-step of it."""
        self.folder.mkdir(exist_ok=True)
        part = self.folder / "part"
        part.write_text(str(update))
        part.rename(self._limit_file)  # a rank never reads half of it
        return self

    def release(self):
        """Hold no rank any more. The job leaves out its pauses, too, so that the run ends soon."""
        self.hold_before(math.inf)

    def held_members(self, run, update, lost):
        """Return the members of the first generation without the `lost` ranks, or of a newer one,
        once all are held; () before. Until then, a rank that was just killed may look held.
        """
        newest = max((run / "attempts" / "000").glob("generation-*.json"))
        members = {*json.loads(newest.read_text())["members"]}
        if members & {*lost} or not members <= self._held_ranks(update):
            return ()
        return tuple(sorted(members))

    def wait_until_held(self, update, ranks=(0,)):
        """Wait until these ranks are alive and wait before `update`."""
        from tests.helpers import until  # not in the job

        held = f"holding ranks {ranks} before update {update}"
        until(lambda: {*ranks} <= self._held_ranks(update), what=held)

    def _held_ranks(self, update):
        found = [path.name.split("-") for path in self.folder.glob(f"held-{update}-*")]
        return {int(rank) for _, _, rank, pid in found if Path(f"/proc/{pid}").exists()}

    def hold_newcomers(self):
        """Hold every process of a rank that starts from now on, before it asks to join the others.
        Only of a run that trains: a first process is held as well.
        """
        (self.folder / "newcomers").touch()

    def release_newcomers(self):
        (self.folder / "newcomers").unlink()

    # ------------------------------------------------------------------ in the job

    def wait_as_newcomer(self):
        """Wait while newcomers are held; when the job is made."""
        while (self.folder / "newcomers").exists():
            time.sleep(0.02)

    def wait_at(self, update):
        """Wait while `update` is held. A rank that has just (re)started passes None until its first
        boundary: it does not know its update yet, and the others' hold at that boundary holds it.
        """
        if update is None or update < self._limit():
            return
        rank = os.environ["SLURM_PROCID"]
        marker = self.folder / f"held-{update}-{rank}-{os.getpid()}"
        marker.touch()
        while update >= self._limit():
            time.sleep(0.02)  # between two polls
        marker.unlink()

    @property
    def released(self):
        return self._limit() == math.inf

    def _limit(self):
        try:
            return float(self._limit_file.read_text())
        except FileNotFoundError:
            return math.inf
