"""A recorded run: its updates, its checkpoints, and which samples each update had. Only reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator.config.job_source import check_target
from orchestrator.config.program import is_program
from orchestrator.config.reading import read_config
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, RunFolderError, UsageError
from orchestrator.plan.order import DataOrder, Shards
from orchestrator.plan.parts import JobFacts, branch_in
from orchestrator.plan.plan import Plan
from orchestrator.plan.window import planner_of
from orchestrator.plugins import FRAMEWORKS
from orchestrator.rundir.checkpoints import list_checkpoints, load, updates_after
from orchestrator.rundir.folder import RunDir
from orchestrator.rundir.metrics import History, Record, read_metrics
from orchestrator.runs.inputs import INPUTS, differences, other_versions, rewritten_data
from orchestrator.runs.recorded import check_own, submission_directory

SPIKE_UPDATES = 32
"""Updates before a jump, whose losses say what is usual."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Samples that one micro-step computes.

    Attributes:
        number: of the micro-step in its update; in reproducible mode that of the leaf.
        rank: of the plan.
        samples: numbers in the data set.
    """

    number: int
    rank: int
    samples: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"micro_step": self.number, "rank": self.rank, "samples": list(self.samples)}


class RecordedRun:
    """A run that is only read.

    Raises:
        RunFolderError: there is no run, it is another user's, or its configuration is damaged.
        UsageError: it cannot be replayed.
    """

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path.absolute()).existing()
        check_own(self.run)
        try:
            self.config: Config = read_config(self.run.read_config())
        except ConfigError as error:
            raise RunFolderError(f"{self.run.config} is damaged: {error}") from error
        self.plan_figures = self.run.read_plan()
        self.is_program = is_program(self.config.job)
        self._refuse_other_frameworks()

    def _refuse_other_frameworks(self) -> None:
        known = (self.run.read_environment() or {}).get("framework") or {}
        framework = next((name for name in FRAMEWORKS.ours if name in known), None)
        if framework is None and not self.is_program:
            with submission_directory(self.run):
                framework = check_target(self.config.job["_target_"]).framework
        if framework not in (None, "torch"):
            raise UsageError(
                f"{self.run.path} was trained with {framework}; a replay needs torch, whose engine "
                "reports the loss of each micro-step"
            )

    @property
    def path(self) -> Path:
        return self.run.path

    @cached_property
    def history(self) -> History:
        return read_metrics(self.run.metrics)

    @cached_property
    def updates(self) -> Sequence[Record]:
        """The records that count, by update."""
        updates = self.history.updates
        if not updates:
            raise UsageError(f"{self.path} has recorded no update yet, so there is none to replay")
        if "micro_steps" not in updates[0]:
            raise UsageError(
                f"{self.path} is of a program with a loop of its own, whose samples and weights "
                "are not known here; a replay needs a job class, or a loop over run.windows()"
            )
        return updates

    @property
    def last(self) -> int:
        """The last update that was recorded."""
        return int(self.updates[-1]["update"])

    @property
    def is_exact(self) -> bool:
        """True if every number of ranks gives the same bits."""
        return self.reduction == "reproducible"

    @cached_property
    def reduction(self) -> str:
        if not self.is_program:
            return self.config.accumulation.reduction
        return "reproducible" if "gradient_digest" in self.updates[-1] else "fast"

    @cached_property
    def windows(self) -> Mapping[str, Any]:
        """What decides the samples of `run.windows`, by the newest checkpoint; {} without one."""
        for folder in reversed(list_checkpoints(self.run.checkpoints)):
            try:
                return load(folder, self.run.identity, contents=False).extra.get("windows") or {}
            except RunFolderError:
                continue
        return {}

    def require_update(self, update: int) -> Record | None:
        """Return the record of an update; None of the one in which the run failed.

        Raises:
            UsageError: the run has not reached it.
        """
        record = self.history.update(update)
        result = self.run.read_result() or {}
        fails_there = update == self.last + 1 and result.get("state") == "failed"
        if record is None and not fails_there:
            first = self.updates[0]["update"]
            nearest = min(max(update, first), self.last)
            raise UsageError(
                f"--update {update}: {self.path} has recorded updates {first} to {self.last} "
                f"(counted from 0, as in metrics.jsonl); the nearest is --update {nearest}"
            )
        return record

    def spike(self) -> int:
        """Return the update whose loss lies furthest above those before it, in units of their
        usual distance from their median; of a run that failed at a loss that is not finite, that.

        Raises:
            UsageError: too few updates to know what is usual.
        """
        losses = [(int(record["update"]), record["loss"]) for record in self.updates]
        for update, loss in losses:
            if loss is None or not math.isfinite(loss):
                return update
        failures = self.run.failures(self.run.latest_attempt)
        if any(failure.get("non_finite") for failure in failures):
            return self.last + 1
        largest, spike = 0.0, None
        for place, (update, loss) in enumerate(losses):
            before = [value for _, value in losses[max(0, place - SPIKE_UPDATES) : place]]
            if len(before) < 3:
                continue
            usual = median(before)
            spread = median(abs(value - usual) for value in before) or abs(usual) * 1e-3 or 1e-12
            if (loss - usual) / spread > largest:
                largest, spike = (loss - usual) / spread, update
        if spike is None:
            raise UsageError(
                f"{self.path} has recorded {len(losses)} updates, and no loss lies above the three "
                "before it; name an update: --update N"
            )
        return spike

    def checkpoint_before(self, update: int) -> tuple[Path | None, list[str]]:
        """Return the newest valid checkpoint from which `update` can be reached, and why later
        ones were passed over; None: from the initial weights.
        """
        passed_over: list[str] = []
        folders = [*list_checkpoints(self.run.checkpoints), *list_checkpoints(self.run.best)]
        for folder in sorted(folders, key=lambda folder: folder.name, reverse=True):
            if updates_after(folder) > update:
                continue
            try:
                load(folder, self.run.identity)
            except RunFolderError as error:
                passed_over.append(f"{error}; beginning with an earlier one")
            else:
                return folder, passed_over
        return None, passed_over

    def checkpoint_after(self, update: int) -> Path | None:
        """Return the first valid checkpoint that holds `update`; None without one."""
        folders = [*list_checkpoints(self.run.checkpoints), *list_checkpoints(self.run.best)]
        for folder in sorted(folders, key=lambda folder: folder.name):
            if updates_after(folder) > update:
                try:
                    load(folder, self.run.identity)
                except RunFolderError:
                    continue
                return folder
        return None

    def changes(self, *, code: bool = True) -> list[str]:
        """Return what has changed in code, data and versions since the run began.

        Args:
            code: today's is used.
        """
        inputs = dict(self.run.read_submission().get(INPUTS) or {})
        versions = [f"another version of {text}" for text in other_versions(inputs)]
        if not code:
            inputs.pop("code", None)
        with submission_directory(self.run):
            changed = [*differences(self.run, inputs, self.config), *versions]
            rewritten = rewritten_data(self.run, inputs, self.config)
        return [*(f"{text} since the run began" for text in changed), *rewritten]

    # ------------------------------------------------------------------ samples

    @cached_property
    def order(self) -> DataOrder:
        """The order of samples.

        Raises:
            UsageError: it is not known.
        """
        if not self.is_program:
            return self._plan.order
        windows = self.windows
        if not windows:
            raise UsageError(
                f"{self.path} has no valid checkpoint, and a loop over run.windows() keeps its "
                "order of samples in those"
            )
        lengths, lanes = windows.get("shards"), windows.get("lanes of shards")
        return DataOrder(
            dataset_samples=windows["samples"],
            global_batch=windows["global_batch"],
            ragged=windows["ragged"],
            seed=windows["seed"],
            shards=Shards(tuple(lengths), int(lanes or 0)) if lengths else None,
            batch_schedule=tuple((int(u), int(g)) for u, g in windows["batch_schedule"]),
        )

    @cached_property
    def _plan(self) -> Plan:
        figures = self.plan_figures
        if figures.get("dataset_samples") is None:
            raise UsageError(
                f"{self.path} has not begun to train, so the size of its data set is not known"
            )
        shards = figures.get("shards")
        facts = JobFacts(
            nodes=figures.get("nodes"),
            dataset_samples=figures["dataset_samples"],
            lengths_digest=figures.get("lengths_digest"),
            parameters=figures.get("parameters"),
            base_rate=(figures.get("schedule") or {}).get("base_lr"),
            shards=Shards(tuple(shards["lengths"]), shards["lanes"]) if shards else None,
            branch=branch_in(figures),
        )
        return Plan.of(self.config, facts)

    def pieces(self, update: int) -> list[Piece]:
        """Return the micro-steps of an update with their samples, by the plan alone.

        Where lengths or the program's own loop decide them, all samples are one piece.
        """
        by_length = not self.is_program and self.config.accumulation.micro_tokens is not None
        leaf = self.windows.get("micro_batch (of reduction='reproducible')")
        samples = tuple(self.order.indices(update).tolist())
        if self.is_program and leaf:
            starts = range(0, len(samples), leaf)
            return [
                Piece(number=number, rank=0, samples=samples[start : start + leaf])
                for number, start in enumerate(starts)
            ]
        if self.is_program or (by_length and self._plan.work is None):
            return [Piece(number=0, rank=0, samples=samples)]
        planner = planner_of(self._plan)
        split = planner.assignment(update)
        return [
            Piece(number=micro_batch.number, rank=rank, samples=micro_batch.indices)
            for rank in range(split.ranks)
            for micro_batch in planner.window(update, rank, split).micro_batches
        ]

    def uses(self, sample: int) -> Iterator[tuple[int, int, int]]:
        """Yield (update, epoch, position in the update) of each recorded use of a sample.

        Raises:
            UsageError: the data set has no such sample.
        """
        size = self.order.dataset_samples
        if not 0 <= sample < size:
            nearest = min(max(sample, 0), size - 1)
            raise UsageError(
                f"--sample {sample}: the data set has samples 0 to {size - 1}; the nearest is "
                f"--sample {nearest}"
            )
        for update in range(self.last + 1):
            for position in (self.order.indices(update) == sample).nonzero()[0].tolist():
                yield update, self.order.epoch_of(update), position
