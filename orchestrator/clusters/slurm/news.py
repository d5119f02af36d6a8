"""What a followed job's scheduler says that its run's folder does not show, each thing once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime

from orchestrator.scheduler.jobs import Job


class News:
    """Remembers what was told."""

    def __init__(self) -> None:
        self._standing = ""
        self._silent = False
        self._waited = 0.0

    def of(self, job: Job | None, silent_since: datetime | None, attempt: int) -> Sequence[str]:
        """What is new: that the scheduler fell silent, or answers again; where the job is."""
        return [*self._of_scheduler(silent_since), *self._of_job(job, attempt)]

    def _of_scheduler(self, silent_since: datetime | None) -> Iterator[str]:
        if silent_since is not None and not self._silent:
            self._silent, self._waited = True, time.monotonic()
            yield (
                f"the scheduler has not answered since {silent_since:%H:%M:%S}; the job is "
                f"not affected, and it is asked again and again"
            )
        elif self._silent and silent_since is None:
            self._silent = False
            yield f"the scheduler answers again, {time.monotonic() - self._waited:.0f} s later"

    def _of_job(self, job: Job | None, attempt: int) -> Iterator[str]:
        if job is None or not job.alive:
            return
        where = f"on {job.nodes}" if job.nodes else (f"({job.reason})" if job.reason else "")
        restarts = f", attempt {attempt + 1}" if attempt else ""
        standing = f"{job.state} {job.nodes} {attempt}"
        if standing != self._standing:
            self._standing = standing
            still = f": {job.standstill}" if job.standstill else ""
            yield f"job {job.id} is {job.state.lower()} {where}{restarts}".strip() + still
