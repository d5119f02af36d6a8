"""Lightning's Trainer in a run: its figures, its stop, its own checkpoint."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from orchestrator.client.framework_state import figures_of, mark, newest
from orchestrator.client.run import current_run as run

# There are two packages of it, whose classes are not each other's.
if not TYPE_CHECKING and "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    from pytorch_lightning import Callback as Base
else:
    from lightning.pytorch import Callback as Base

PREFIX = "lightning-"


class LightningCallback(Base):
    """`Trainer(..., callbacks=[ours := LightningCallback()])`, then
    `Trainer.fit(model, ckpt_path=ours.checkpoint)`.

    The loss that it records is rank 0's, the mean of the update's micro-batches.

    Args:
        every: updates between checkpoints, besides the one at a stop; None for none.
    """

    def __init__(self, every: int | None = None) -> None:
        self._every, self._done, self._losses = every, 0, list[Any]()

    @property
    def checkpoint(self) -> str | None:
        """The newest whole checkpoint of this run; None where the training begins."""
        checkpoint = newest(PREFIX)
        return None if checkpoint is None else str(checkpoint[1])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over SIGTERM, as a request to stop: Lightning's handler calls a collective."""
        del pl_module
        self._done = trainer.global_step
        run.take_sigterm()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After each micro-batch, on every rank."""
        del pl_module, batch, batch_idx
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None and run and trainer.is_global_zero:
            self._losses.append(loss.detach() * trainer.accumulate_grad_batches)
        if not run or trainer.global_step == self._done:
            return
        self._done = trainer.global_step
        update = self._done - 1
        losses, self._losses = self._losses, []
        if losses:
            run.report(update, loss=sum(losses) / len(losses), **figures_of(trainer.logged_metrics))
        stops = run.should_stop(update)
        if stops or (self._every and self._done % self._every == 0):
            path = run.checkpoint_dir / f"{PREFIX}{update + 1}"
            trainer.save_checkpoint(path)  # ends with a barrier
            mark(path, update, first_rank=trainer.is_global_zero)
        if stops:
            fit = trainer.fit_loop
            fit.min_epochs = fit.epoch_loop.min_steps = None  # a stop does not wait for them
            trainer.should_stop = True
