"""A loop with Accelerate in a run: its figures, its stop, its own checkpoint."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from orchestrator.client.framework_state import mark, newest
from orchestrator.client.run import current_run as run

PREFIX = "accelerate-"


class AccelerateUpdates:
    """The updates of a loop: where it begins, and what follows each of them.

        updates = AccelerateUpdates(accelerator)  # after prepare()
        for update in range(updates.first, 1000):
            ...
            if updates.ends_after(update, loss=loss):
                break

    Args:
        accelerator: everything was prepared by it, so that its state can be loaded here.
        every: updates between checkpoints, besides the one at a stop; None for none.

    Attributes:
        first: the update to begin with, from 0.
    """

    def __init__(self, accelerator: Accelerator, every: int | None = None) -> None:
        self._accelerator, self._every = accelerator, every
        checkpoint = newest(PREFIX)
        self.first = 0
        if checkpoint is not None:
            self.first, folder = checkpoint
            accelerator.load_state(str(folder))

    def ends_after(
        self, update: int, *, loss: Any, samples: int | None = None, **more: Any
    ) -> bool:
        """Record `update` and say whether the loop ends here, its state saved. On every rank.

        Args:
            loss, samples, more: as of `run.report`; rank 0's count.
        """
        run.report(update, loss=loss, samples=samples, **more)
        stops = run.should_stop(update)
        if run and (stops or (self._every and (update + 1) % self._every == 0)):
            folder = run.checkpoint_dir / f"{PREFIX}{update + 1}"
            self._accelerator.save_state(str(folder))
            self._accelerator.wait_for_everyone()
            mark(folder, update, first_rank=self._accelerator.is_main_process)
        return stops
