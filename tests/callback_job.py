"""Jobs with callbacks, which write each call down. No framework is imported with this module."""

import json
import random
import sys
from pathlib import Path

from orchestrator import current_run
from orchestrator.callbacks import Callback
from tests.light_job import Light


def write_call(method, *values):
    """Add a line with the method, update, rank and ranks, and further values to the rank's file."""
    line = [method, current_run.update, current_run.rank, current_run.ranks, *values]
    with Path(current_run.folder, f"calls-{current_run.rank}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


class Journal(Callback):
    """Writes what each call has. It draws random numbers, which must not matter.

    Args:
        fails_in: the method that raises on rank `fails_on`, in update 3 or after it, in the first
            attempt.
    """

    def __init__(self, fails_in=None, fails_on=0):
        self.fails_in, self.fails_on = fails_in, fails_on

    def _write(self, method, *values):
        random.random()
        if torch := sys.modules.get("torch"):
            torch.rand(())
        write_call(method, *values)
        at = method, current_run.update, current_run.rank, current_run.attempt
        if at == (self.fails_in, 3, self.fails_on, 0):
            raise ZeroDivisionError("the journal is full")

    def on_micro_step(self, update, done, steps):
        self._write("on_micro_step", update, done, steps)

    def on_held_out_piece(self, done):
        self._write("on_held_out_piece", done)

    def on_boundary(self, done):
        self._write("on_boundary", done.window.update, done.report.loss, done.report.metrics)

    def on_evaluation(self, window, figures):
        self._write("on_evaluation", window.update, dict(figures))
        figures.clear()  # its own copy

    def on_checkpoint(self, updates, samples):
        self._write("on_checkpoint", updates, samples)


class Second(Callback):
    """Is called after `Journal`."""

    def on_boundary(self, done):
        write_call("second", done.window.update)


class Journaled:
    """Mixin for a job that is written down. Args: see `Journal`."""

    def __init__(self, fails_in=None, fails_on=0, **more):
        super().__init__(**more)
        self.fails_in, self.fails_on = fails_in, fails_on

    def callbacks(self):
        return [Journal(self.fails_in, self.fails_on), Second()]


class JournaledLight(Journaled, Light):
    """The light job, which rank 0 evaluates alone."""


class Wrong(Light):
    """Has something else as callbacks. Args: what: kind of it."""

    def __init__(self, what, **more):
        super().__init__(**more)
        self.what = what
        if what == "attribute":
            self.callbacks = [Journal()]

    def callbacks(self):
        return {"nothing": None, "class": [Journal], "function": [print]}[self.what]
