"""Hugging Face's Trainer in a run: its figures, its stop, its own checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback as Base

from orchestrator.client.framework_state import figures_of, mark, newest
from orchestrator.client.run import current_run as run

PREFIX = "checkpoint-"  # the Trainer's own


class TrainerCallback(Base):
    """`Trainer(..., callbacks=[ours := TrainerCallback()])`, then
    `Trainer.train(resume_from_checkpoint=ours.checkpoint)`.

    Its checkpoints have to lie in the run: `TrainingArguments(output_dir=run.checkpoint_dir)`. What
    the Trainer logs is recorded; `logging_steps=1` has every update in the record.
    """

    @property
    def checkpoint(self) -> str | None:
        """The newest whole checkpoint of this run; None where the training begins."""
        checkpoint = newest(PREFIX)
        return None if checkpoint is None else str(checkpoint[1])

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse checkpoints that the next start would not find."""
        del state, control
        if run and Path(args.output_dir).absolute() != run.checkpoint_dir:
            raise ValueError(
                f"TrainingArguments(output_dir={str(args.output_dir)!r}): with our callback "
                "checkpoints belong to the run: output_dir=run.checkpoint_dir (from orchestrator "
                "import current_run as run)"
            )
        run.take_sigterm()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After each update, on every rank."""
        del args
        if run.should_stop(state.global_step - 1):
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Record what the Trainer logs of an update."""
        del control
        if logs and "loss" in logs:
            samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
            run.report(
                state.global_step - 1, loss=logs["loss"], samples=samples, **figures_of(logs)
            )

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark a checkpoint that the Trainer has written."""
        del args, control
        if run:
            done, first = state.global_step, state.is_world_process_zero
            mark(run.checkpoint_dir / f"{PREFIX}{done}", done - 1, first_rank=first)
