"""Refusal of changes with which a run cannot be resumed."""

from __future__ import annotations

from orchestrator.config.changes import OTHER_FOLDER, Change, Kind
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError
from orchestrator.plan.plan import Plan
from orchestrator.plan.window import planner_of

MOST_UPDATES = 5_000  # compared one by one; of longer runs so many, evenly


def refuse_other_numbers(made: list[Change], run: str, *, program: bool = False) -> None:
    """Raises `ConfigError` naming every change that makes other numbers, and what can be done."""
    wrong: list[str] = []
    for change in made:
        if change.kind is not Kind.NUMBERS:
            continue
        why = OTHER_FOLDER.get(change.key) or (
            f"it was {'null' if change.before is None else change.before}, and the updates that "
            f"are done were made with that"
        )
        wrong.append(f"a run cannot go on with {change.text}: {why}")
    if wrong:
        raise ConfigError("\n".join([*wrong, anew(run, program=program)]))


def anew(run: str, *, program: bool = False) -> str:
    """What to do instead."""
    if program:
        return (
            f"a program with other words is a new run; what this one saved stays in "
            f"{run}/checkpoints"
        )
    return (
        f"to go on from these weights with other settings, start a new run: "
        f"train.initial_weights={run}"
    )


def refuse_another_plan(old: Plan, new: Plan, done: int, run: str) -> None:
    """Raises `ConfigError` when an update would be of other samples or at another rate.

    Args:
        old, new: of the run as it was, and as it would be.
        done: updates that the newest checkpoint holds.
    """
    if new.updates is not None and new.updates < done:
        raise ConfigError(
            f"{done} updates are done already, which is more than the {new.updates} that are asked "
            f"for now; try train.updates={done + 1} or more"
        )
    before, asked = old.batch, new.batch
    if asked.global_batch != before.global_batch:
        raise ConfigError(
            f"an update would be of {asked.global_batch} samples, but was of {before.global_batch} "
            f"so far; to keep it, add accumulation.global_batch={before.global_batch} "
            f"accumulation.steps={before.steps} accumulation.micro_batch=null\n{anew(run)}"
        )
    leaf, leaf_before = asked.micro_batch_cap, before.micro_batch_cap
    if new.modes.reduction == "reproducible" and leaf != leaf_before:
        raise ConfigError(
            f"accumulation.micro_batch={leaf}: in reproducible mode it is the size of a "
            f"leaf, which was {leaf_before} so far; another one is another sum\n{anew(run)}"
        )
    for update in _looked_at(old, new):
        rates = [plan.rates.schedule.learning_rate(update)
                 for plan in (old, new) if plan.rates.schedule]  # fmt: skip
        if len(set(rates)) > 1:
            raise ConfigError(
                f"the learning rate of update {update + 1} would be {rates[1]:.6g}, but "
                f"was to be {rates[0]:.6g}: schedule.* decides it, and where "
                f"schedule.decay is not none, the number of updates does, too\n{anew(run)}"
            )
        if update < done and _samples(old, update) != _samples(new, update):
            raise ConfigError(
                f"update {update + 1} was of {_samples(old, update)} samples, and would be of "
                f"{_samples(new, update)} in the run that is asked for now\n{anew(run)}"
            )


def _looked_at(old: Plan, new: Plan) -> list[int]:
    if old.updates is None or new.updates is None:
        return []
    common = min(old.updates, new.updates)
    step = max(1, common // MOST_UPDATES)
    return sorted({*range(0, common, step), common - 1})


def _samples(plan: Plan, update: int) -> int:
    return planner_of(plan).order.samples_of(update) if plan.length.dataset_samples else 0


def rounding(made: list[Change], old: Plan, new: Plan, config: Config) -> str | None:
    """A sentence when what follows agrees with the undisturbed run up to rounding only."""
    kept = config.accumulation.reduction == old.modes.reduction == "reproducible"
    same_split = kept or old.split.micro_batches == new.split.micro_batches
    split = [] if same_split else ["another split of the batch"]
    causes = split + [change.text for change in made if change.kind is Kind.ROUNDING]
    if not causes:
        return None
    dropout = "" if kept else ", and random numbers as dropout's are drawn for other micro-batches"
    return (
        f"from here on sums are added in another order ({', '.join(causes)}): results agree with "
        f"those of the undisturbed run up to rounding, not in bits{dropout if split else ''}"
    )
