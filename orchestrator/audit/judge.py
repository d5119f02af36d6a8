"""The verdicts of an audit: pure functions of the observations.

For one update, rank r's micro-step k has the gradient G_rk (its own, before any reduction), and
each of its n_rk samples or tokens has the weight w_rk in its loss. The gradient of one big batch is

    T = (Σ_rk G_rk / w_rk) / Σ_rk n_rk.

The gradient A that an optimizer applies is explained as Σ c_rk G_rk: first by what scripts usually
do (an average over ranks, no reduction, the last micro-step alone, …), else by least squares. A
sample of micro-step rk has the weight c_rk w_rk in the update. It is right if all these are alike,
sum to one, and A agrees with T.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
CLIPPED_WHILE_SCALED = "clipped before the loss scaler's scale was removed"
RIGHT, SLOW, WRONG, UNJUDGED = "right", "slow", "wrong", "not judged"
ROWS = (
    "weights",
    "length",
    "gradient",
    "synchrony",
    "reductions",
    "clearing",
    "clipping",
    "data",
    "layers",
    "environment",
)
ESSENTIAL = ("weights", "length", "gradient", "synchrony", "clearing", "clipping")
EQUAL = 1e-5
"""Weights, and lengths, that differ relatively by less are equal: float32 rounds them."""
TOLERANCE = {
    "torch.float64": 1e-9,
    "torch.float32": 3e-5,
    "torch.bfloat16": 3e-2,
    "torch.float16": 5e-3,
}
REDUCING = ("ddp", "allreduce", "reduce", "reduce_scatter", "_reduce_scatter_base")
OF_GRADIENT = 0.9
"""Share of a gradient's bytes from which on a collective, or all of a micro-step, reduce it."""


@dataclass(frozen=True)
class Finding:
    """The result of one check of one update, or of the run where `update` is None."""

    row: str
    state: str
    text: str
    fault: str | None = None
    update: int | None = None


@dataclass
class JudgedWindow:
    """One update of one optimizer on one rank.

    Attributes:
        record: what was observed; see `observe.Observer.after_step`.
        gradients: a row for each micro-step, float64.
        applied: the gradient at the optimizer's step, float64.
        before_clip: at the last clipping, if there was one.
        moved: the weights changed within the update, and only what followed is left.
        shared: a backward pass counts in another optimizer's update too, others do not.
    """

    record: dict[str, Any]
    gradients: Array
    applied: Array
    before_clip: Array | None
    moved: bool = False
    shared: bool = False

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.record["micro_steps"]

    @property
    def backwards(self) -> list[int]:
        """The number of each micro-step's backward pass."""
        return [step["backward"] for step in self.steps]

    @property
    def reasons(self) -> list[str]:
        """Why the update cannot be judged."""
        return [why for why in self.record["reasons"] if why != CLIPPED_WHILE_SCALED]

    @property
    def last_cleared(self) -> int:
        """The last micro-step before which the gradient was cleared."""
        return max((n for n, step in enumerate(self.steps) if step["cleared"]), default=0)

    @property
    def members(self) -> list[list[int]]:
        """The numbers of each micro-step's backward passes, if several lines have one."""
        return [step.get("members", [step["backward"]]) for step in self.steps]

    @property
    def lines(self) -> list[tuple[str, ...]]:
        """The lines with each micro-step's backward pass."""
        return [tuple(step["lines"]) for step in self.steps]

    def since(self, first: int) -> JudgedWindow:
        """Return the window without the micro-steps before `first`."""
        if not first:
            return self
        clips = [{**c, "after": c["after"] - first} for c in self.record["clips"]]
        left_out = self.steps[first - 1]["backward"]
        record = {
            **self.record,
            "micro_steps": self.steps[first:],
            "schedules": [after - first for after in self.record["schedules"]],
            "clips": [clip for clip in clips if clip["after"] > 0],
            "forwards": [f for f in self.record["forwards"] if f["before"] > left_out],
        }
        return replace(self, record=record, gradients=self.gradients[first:])

    def merged(self, count: int) -> JudgedWindow:
        """Return the window with each `count` neighbouring backward passes as one micro-step."""
        groups = [self.steps[i : i + count] for i in range(0, len(self.steps), count)]
        steps = [
            {
                **group[-1],
                "cleared": group[0]["cleared"],
                "members": [step["backward"] for step in group],
                "lines_of_members": [step["lines"] for step in group],
                "loss": _add_losses([step["loss"] for step in group]),
            }
            for group in groups
        ]
        record = {
            **self.record,
            "micro_steps": steps,
            "schedules": [-(-after // count) for after in self.record["schedules"]],
            # Within a micro-step it is not whole.
            "clips": [{**c, "after": c["after"] // count} for c in self.record["clips"]],
        }
        gradients = self.gradients.reshape(len(groups), count, -1).sum(1)
        return replace(self, record=record, gradients=gradients)


@dataclass
class Trace:
    """The observations of one rank."""

    windows: dict[tuple[int, int], JudgedWindow] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0


@dataclass
class Judgement:
    """All findings, with the numbers of each update.

    Attributes:
        updates: for each update of each optimizer: micro-steps a rank, and the relative error and
            length of the applied gradient against the big batch's.
        notes: facts worth knowing that are no faults.
    """

    findings: list[Finding] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def say(
        self, row: str, state: str, text: str, fault: str | None = None, update: int | None = None
    ) -> None:
        self.findings.append(Finding(row, state, text, fault, update))

    def state(self, row: str) -> str:
        states = [f.state for f in self.findings if f.row == row]
        if not states:
            return UNJUDGED
        return next(state for state in (WRONG, UNJUDGED, SLOW, RIGHT) if state in states)

    @property
    def faults(self) -> list[str]:
        return list(dict.fromkeys(f.fault for f in self.findings if f.fault))


def read_trace(folder: Path, rank: int) -> Trace:
    """Read the records of one rank. A line that a killed rank has not ended is left out."""
    trace = Trace()
    lines = (folder / f"rank-{rank:05d}.jsonl").read_text().splitlines()
    with (folder / f"rank-{rank:05d}.bin").open("rb") as data:
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            if "end" in record:
                trace.end = record
            elif "skipped" in record:
                trace.skipped += 1
            else:
                steps = len(record["micro_steps"])
                count = steps + 1 + record["clipped"]
                data.seek(record["offset"])
                values = np.frombuffer(data.read(8 * count * record["values"]))
                rows = values.reshape(count, record["values"])
                clipped = rows[steps + 1] if record["clipped"] else None
                window = JudgedWindow(record, rows[:steps], rows[steps], clipped)
                trace.windows[record["optimizer"], record["update"]] = window
    # Each optimizer's record has a forward pass as it was at that time.
    for window in trace.windows.values():
        forwards = window.record["forwards"]
        window.record["forwards"] = [f for f in forwards if not f.get("frozen")]
    forwards = [f for window in trace.windows.values() for f in window.record["forwards"]]
    used = {f["number"] for f in forwards if f["used"]}
    known: dict[int, bool] = {}
    for f in forwards:
        if f["data"] is not None:
            known[f["number"]] = known.get(f["number"], False) or f["data"]
    for f in forwards:
        f["used"], f["data"] = f["number"] in used, known.get(f["number"])
    return trace


def judge(traces: Sequence[Trace]) -> Judgement:
    """Judge a run by the traces of all its ranks."""
    judgement = Judgement()
    keys = sorted({key for trace in traces for key in trace.windows})
    whole = [key for key in keys if all(key in trace.windows for trace in traces)]
    if len(whole) < len(keys):
        text = (
            f"ranks have made different numbers of updates: {len(whole)} are common to all, "
            f"{len(keys) - len(whole)} are not"
        )
        judgement.say("synchrony", WRONG, text, "not-in-step")
    windows = {key: [trace.windows[key] for trace in traces] for key in whole}
    for rank in range(len(traces)):
        _separate_optimizers({key: ranks[rank] for key, ranks in windows.items()}, windows, rank)
    by_optimizer: dict[int, dict[tuple[int, int], list[JudgedWindow]]] = {}
    for key in whole:
        by_optimizer.setdefault(key[0], {})[key] = windows[key]
    discarded = 0
    ambiguous: dict[int, str] = {}
    for optimizer, own in by_optimizer.items():
        discarded += _leave_out_discarded(own)
        if text := _merge_terms(own):
            ambiguous[optimizer] = text
    if discarded:
        judgement.notes.append(
            f"the gradients of {discarded} micro-steps of rank 0 were cleared before they counted, "
            "as at the end of an epoch that leaves less than a window"
        )
    every = [w for own in by_optimizer.values() for ranks in own.values() for w in ranks]
    data_at: dict[tuple[str, ...], set[bool]] = {}
    for forward in (f for window in every for f in window.record["forwards"]):
        if not forward["used"] and forward["data"] is not None:
            data_at.setdefault(tuple(forward["lines"]), set()).add(forward["data"])
    probes = [trace.end.get("probes", []) for trace in traces]
    judged: list[list[_Update]] = []
    for optimizer, own in by_optimizer.items():
        its_windows = [window for ranks in own.values() for window in ranks]
        usual = max(len(window.steps) for window in its_windows)
        depth = _depth(its_windows)
        free = _free_terms(own, probes)
        updates: list[_Update] = []
        for (_, update), ranks in own.items():
            before = traces[0].windows.get((optimizer, update - 1))
            judged_update = _Update(judgement, ranks, before, update, usual, depth)
            judged_update.several = len(by_optimizer) > 1
            judged_update.data_at = data_at
            judged_update.free_terms = free
            judged_update.ambiguous = ambiguous.get(optimizer)
            judged_update.judge()
            updates.append(judged_update)
        judged.append(updates)
    for updates in judged:
        _judge_lengths([update for update in updates if update.level is not None])
        for judged_update in updates:
            judged_update.judge_gradient()
    if schedule := _describe_schedule(every):
        judgement.notes.append(schedule)
    _judge_run(
        judgement, traces, [ranks for own in by_optimizer.values() for ranks in own.values()]
    )
    return judgement


def _add_losses(losses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one loss with the terms of several."""
    first, *more = losses
    others = [term for loss in more for term in ({**loss, "others": []}, *loss["others"])]
    reason = next((loss["reason"] for loss in losses if loss["reason"]), None)
    return {**first, "reason": reason, "others": [*first["others"], *others]}


def _separate_optimizers(
    own: dict[tuple[int, int], JudgedWindow],
    windows: dict[tuple[int, int], list[JudgedWindow]],
    rank: int,
) -> None:
    """Leave out of each optimizer's window the parts of another one's update: backward passes
    that were applied there before this optimizer's gradients were cleared (as a generator's loss
    reaches the discriminator). Leave out what precedes a change of weights, too.

    Args:
        own: all windows of one rank.
        windows: where its windows are replaced.
    """
    counted = {key: set(window.backwards[window.last_cleared :]) for key, window in own.items()}
    for key, window in own.items():
        others = [
            (other.record["at"], counted[other_key])
            for other_key, other in own.items()
            if other_key[0] != key[0]
        ]
        first = window.last_cleared
        begin = window.backwards[first] if window.steps else 0
        applied = [backwards for at, backwards in others if at < begin]
        if not all(any(b in own for own in applied) for b in window.backwards[:first]):
            first = 0
        moved = [n for n, step in enumerate(window.steps) if n > first and step["moved"]]
        lengths = {b - a for a, b in pairwise([first, *moved, len(window.steps)])}
        kept = window.since(first)
        if moved and len(lengths) == 1:
            kept = replace(window.since(moved[-1]), moved=True)
        left = set(kept.backwards)
        shared = any(left & backwards and left - backwards for _, backwards in others)
        windows[key][rank] = replace(kept, shared=shared)


def _merge_terms(own: dict[tuple[int, int], list[JudgedWindow]]) -> str | None:
    """Merge backward passes at different lines, which are terms of one loss, as those of a
    discriminator for real and generated samples.

    Returns:
        Why that they are terms is not certain, if it is not.
    """
    every = [window for ranks in own.values() for window in ranks]
    cycles = [[*dict.fromkeys(window.lines)] for window in every]
    counts = {len(cycle) for cycle in cycles}
    if len(counts) != 1 or counts <= {0, 1}:
        return None
    [count] = counts
    for window, cycle in zip(every, cycles, strict=True):
        repeats = len(window.steps) // count
        if window.lines != cycle * repeats:
            return None
    groups = [w.steps[i : i + count] for w in every for i in range(0, len(w.steps), count)]
    if any(len({step["quiet"] for step in group}) > 1 for group in groups):
        return None  # the last micro-step of a window has a line of its own
    fetches = any(len({step["fetched"] for step in group}) > 1 for group in groups)
    if all(_are_alike(w, fetches=fetches) for w in every):
        lines = ", ".join(dict.fromkeys(_where(cycle) for cycle in cycles[0]))
        return (
            f"backward passes at {lines} are terms of one loss or undivided micro-steps: add the "
            "terms, or call backward at one line"
        )
    for ranks in own.values():
        ranks[:] = [window.merged(count) for window in ranks]
    return None


def _where(lines: Sequence[str]) -> str:
    """Return the innermost of a backward pass's lines."""
    return lines[0].partition("#")[0] if lines else "a line of no script"


def _are_alike(window: JudgedWindow, *, fetches: bool) -> bool:
    """Return whether all losses are of one kind, each after as many forward passes (or after a
    micro-batch that a loader gives), unlike those for real and generated samples.
    """
    kinds = {
        tuple(
            r["name"]
            for term in (step["loss"], *step["loss"]["others"])
            for r in term["reductions"]
        )
        for step in window.steps
    }
    passes = Counter(f["before"] for f in window.record["forwards"])
    return len(kinds) == 1 and (fetches or len({passes[b] for b in window.backwards}) == 1)


def _free_terms(
    own: dict[tuple[int, int], list[JudgedWindow]], probes: Sequence[list[dict[str, Any]]]
) -> set[int]:
    """Return the numbers of loss terms that no sample changes, such as a norm of the weights."""
    windows = [window for ranks in own.values() for window in ranks]
    if any("members" in step for window in windows for step in window.steps):
        return set()  # numbers are those of one backward pass
    backwards = [
        {b for ranks in own.values() for b in ranks[i].backwards} for i in range(len(probes))
    ]
    free = [
        {*probe["free"]}
        for numbers, of_rank in zip(backwards, probes, strict=True)
        for probe in of_rank
        if probe["untested"] is None and probe["backward"] in numbers
    ]
    return set.intersection(*free) if free else set()


def _describe_schedule(windows: Iterable[JudgedWindow]) -> str | None:
    """Return a note on schedules that step in micro-steps: what they count is the script's choice,
    and an update uses one rate, its last.
    """
    for window in windows:
        steps = len(window.steps)
        inside = {after for after in window.record["schedules"] if 0 < after < steps}
        changed = any(a["lr"] != b["lr"] for a, b in pairwise(window.steps))
        if (steps > 1 and len(inside) >= max(1, (steps - 1) // 2)) or changed:
            counted = ", ".join(window.record["horizons"]) or "its decay"
            return (
                f"the learning rate changes within a window of {steps} micro-steps (an update uses "
                f"its last one): {counted} should count micro-steps, not updates"
            )
    return None


def _leave_out_discarded(windows: dict[tuple[int, int], list[JudgedWindow]]) -> int:
    """Leave out micro-steps whose gradient was cleared before an update's usual number of them
    began, as at the end of an epoch that leaves a few, or after one that warms up. Where most
    windows have some, it is a fault.

    Returns:
        The number of micro-steps of rank 0 that are left out.
    """
    whole = Counter(
        len(window.steps)
        for ranks in windows.values()
        for window in ranks
        if not window.last_cleared
    )
    usual = max(whole, key=lambda count: (whole[count], count), default=0)
    trimmed: dict[tuple[int, int], list[JudgedWindow]] = {}
    for key, ranks in windows.items():
        firsts = [window.last_cleared for window in ranks]
        kept = [window.since(first) for window, first in zip(ranks, firsts, strict=True)]
        if not any(firsts) or {len(window.steps) for window in kept} != {usual}:
            continue
        rows = np.concatenate([window.gradients for window in kept])
        applied = ranks[0].applied if ranks[0].before_clip is None else ranks[0].before_clip
        if rows.shape[1] < 2 * len(rows) or rows.shape[1] != len(applied):
            continue  # so few values would be explained by anything
        # If the kept micro-steps explain the applied gradient, the others did not count.
        rest = applied - np.linalg.lstsq(rows.T, applied, rcond=1e-5)[0] @ rows
        if np.linalg.norm(rest) <= _tolerance_of(kept) * np.linalg.norm(applied):
            trimmed[key] = kept
    if 2 * len(trimmed) >= len(windows):
        return 0
    left_out = sum(windows[key][0].last_cleared for key in trimmed)
    windows.update(trimmed)
    return left_out


def _tolerance_of(windows: Iterable[JudgedWindow]) -> float:
    dtypes = {dtype for window in windows for dtype in window.record["dtypes"]}
    return max((TOLERANCE.get(dtype, 3e-2) for dtype in dtypes), default=3e-2)


def _depth(windows: Iterable[JudgedWindow]) -> int:
    """Return which reduction of the losses is over samples: the first that has several elements."""
    return _first_of_many(step["loss"]["reductions"] for window in windows for step in window.steps)


def _first_of_many(chains: Iterable[Sequence[dict[str, Any]]]) -> int:
    depths: list[int] = []
    for reductions in chains:
        many = [i for i, reduction in enumerate(reductions) if reduction["elements"] > 1]
        if reductions:
            depths.append(many[0] if many else len(reductions) - 1)
    return min(depths, default=0)


def _differing(digests: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return the names of tensors that two records hold differently."""
    return [name for name, digest in digests.items() if other.get(name, digest) != digest]


@dataclass(frozen=True)
class _Term:
    """A loss term of one micro-step: a mean over `elements`, or a sum.

    Attributes:
        gradient: of the loss with respect to the mean or sum.
        divisor: by which the script made a mean of a sum.
    """

    gradient: float
    elements: float
    divisor: float | None


class _Update:
    """The judgement of one update of one optimizer."""

    def __init__(
        self,
        judgement: Judgement,
        windows: list[JudgedWindow],
        before: JudgedWindow | None,
        update: int,
        usual: int,
        depth: int,
    ) -> None:
        self.judgement, self.windows = judgement, windows
        self.update, self.usual, self.depth = update, usual, depth
        # Without parameters that the optimizer got since then, it cannot have been carried over.
        self.carried = None
        if before is not None and len(before.applied) == len(windows[0].applied):
            self.carried = before.applied
        self.size = len(windows)
        same_parameters = len({len(window.applied) for window in windows}) == 1
        self.reason = None if same_parameters else "ranks have different parameters"
        self.dropped = 0  # forward passes without a backward pass
        # By the lines of such passes: do other passes' losses depend on them, as on targets?
        self.data_at: dict[tuple[str, ...], set[bool]] = {}
        self.free_terms: set[int] = set()  # of the loss, which no sample changes
        self.several = False  # there are other optimizers
        self.ambiguous: str | None = None  # why micro-steps may be terms of one loss
        # Nothing is accumulated, so the update is right whether or not its loss can be read.
        self.is_single = usual == 1 and self.size == 1
        self.name = ""  # how the applied gradient came about
        self.level: float | None = None  # the weight of a sample or token, if all have the same
        self.total: float | None = None  # the number of samples or tokens that it divides by
        self.applied: list[Array] | None = None
        self.weights: list[Array] | None = None
        self.why: str | None = None
        self.tolerance = _tolerance_of(windows)
        self.counts = [len(w.steps) for w in windows]
        share = 1.0 / self.size / windows[0].record["scale"]
        self.average: Array = np.full(sum(self.counts), share)  # coefficients of one over ranks

    def say(self, row: str, state: str, text: str, fault: str | None = None) -> None:
        if self.ambiguous and state == WRONG and row in ("weights", "length"):
            state, text, fault = UNJUDGED, self.ambiguous, None
        self.judgement.say(row, state, text, fault, self.update)

    def judge(self) -> None:
        self._judge_reductions()
        whole = self._judge_clipping()
        self._judge_data()
        other, of_loss = self._reason(), self._reason_of_losses()
        self.why = other or (self.ambiguous if of_loss and self.ambiguous else of_loss)
        losses = self._losses()
        terms = [term for loss in losses for term in (loss, *loss["others"])]
        divided = any({*term["divisors"]} - {*term["averages"]} for term in terms)
        unread = of_loss or any(loss["others"] for loss in losses)
        self.is_single = self.is_single and bool(unread) and not (other or divided)
        self.weights = None if self.why else self._weights()
        if self.weights is None and self.why is None:
            self.why = "micro-steps have different kinds of losses"
        if self.reason or not all(self.counts) or any(w.reasons for w in self.windows):
            for row in ("weights", "length", "clearing", "synchrony"):
                self.say(row, UNJUDGED, str(self.why))
            return
        same = self._judge_synchrony()
        coefficients = self.average  # where the applied gradient cannot be explained
        reason = None
        if not whole:
            reason = "it was clipped before it was whole"
            self.say("clearing", RIGHT, "once an update")
        else:
            applied = [w.applied if w.before_clip is None else w.before_clip for w in self.windows]
            explained = self._explain(applied[0])
            if explained is None:
                reason = (
                    "the applied gradient is no sum of the micro-steps': changed by hand or a hook"
                )
                self.say("clearing", UNJUDGED, reason)
            else:
                coefficients, self.name = explained
                self.applied = applied
                self._judge_clearing(coefficients)
                if self.name == "local" and not same:
                    coefficients = self.average
        self.is_single = self.is_single and reason is None and self.name == "average"
        if self.is_single:
            text = "one micro-step on one rank: the update is that of the script's own loss"
            self.say("weights", RIGHT, text)
            self.say("length", RIGHT, text)
            return
        self.level = self._judge_weights(coefficients)
        if reason:
            self.level, self.why = None, self.why or reason
        if self.level is None:
            self.say("length", UNJUDGED, self.why or "samples count differently")

    # ------------------------------------------------------------------

    def _reason(self) -> str | None:
        """Return why this update's weights cannot be judged."""
        reasons = [self.reason]
        for window in self.windows:
            reasons += window.reasons
            if not window.steps:
                reasons.append("an update without a backward pass")
            own = {forward["before"] for forward in window.record["forwards"]}
            if len(window.steps) > 1 and own and any(own.isdisjoint(m) for m in window.members):
                reasons.append("several backward passes follow one forward pass")
            if window.moved and sum(self.counts) > 1:
                reasons.append(
                    "the weights change within the update, as in sharpness-aware steps: whether "
                    "they do by the gradient of the whole batch was not seen"
                )
            if window.shared:
                reasons.append(
                    "a backward pass belongs to the updates of two optimizers, another to one of "
                    f"them only ({_where(window.lines[-1])})"
                )
            for step, other in pairwise(window.steps):
                for name in _differing(step["state"], other["state"]):
                    reasons.append(f"{name} changes within the window, and is not trained")
                if other["moved"]:
                    reasons.append("weights change between micro-steps, before the update")
                if step["other_updates"] != other["other_updates"]:
                    reasons.append(
                        "another optimizer steps within the window, so the micro-steps' gradients "
                        "belong to different weights"
                    )
        if not any(window.gradients.any() for window in self.windows):
            reasons.append("the gradient is zero, whatever it is multiplied by")
        for window in self.windows[1:]:
            if window.steps and self.windows[0].steps:
                own, first = window.steps[0]["state"], self.windows[0].steps[0]["state"]
                for name in _differing(own, first):
                    reasons.append(f"{name} is not trained, and differs between ranks")
        return next((reason for reason in reasons if reason), None)

    def _losses(self) -> list[dict[str, Any]]:
        return [step["loss"] for window in self.windows for step in window.steps]

    def _reason_of_losses(self) -> str | None:
        reasons = [self._reason_of_loss(loss) for loss in self._losses()]
        return next((reason for reason in reasons if reason), None) or self._reason_of_terms()

    def _divisors(self, term: dict[str, Any], count: float | None) -> list[int]:
        """Return the numbers of micro-steps or ranks that a term was divided by.

        Args:
            count: of its own elements, by which it was divided too.
        """
        counts = {max(self.counts), self.usual, self.size, self.usual * self.size} - {1}
        divisors = [*term["divisors"], *(1 / f for f in term["factors"] if f)]
        if count in divisors:
            divisors.remove(count)
        return sorted(n for n in counts for d in divisors if abs(d / n - 1) <= EQUAL)

    def _as_means(self, terms: Sequence[dict[str, Any]], depth: int) -> tuple[list[_Term], bool]:
        """Return the reductions of one term in each micro-step, and whether they are means: a sum
        that is divided by the number of the micro-batch's samples or elements is one.
        """
        reductions = [term["reductions"][depth] for term in terms]
        if not any(r["is_mean"] for r in reductions):
            rows, samples = (np.concatenate(self._units(name)) for name in ("rows", "samples"))
            for counts in (rows, samples, [r["elements"] for r in reductions]):
                if all(n > 1 and n in t["divisors"] for n, t in zip(counts, terms, strict=True)):
                    return [
                        _Term(r["gradient"] * n, n, float(n))
                        for n, r in zip(counts, reductions, strict=True)
                    ], True
        is_mean = all(r["is_mean"] for r in reductions)
        return [_Term(r["gradient"], r["elements"], None) for r in reductions], is_mean

    def _reason_of_terms(self) -> str | None:
        """Return why the first term's weights do not hold for the others that are added to it."""
        losses = self._losses()
        count = len(losses[0]["others"]) if losses else 0
        if any(len(loss["others"]) != count for loss in losses):
            return "micro-steps have different numbers of loss terms"
        if not count:
            return None
        main, main_is_mean = self._as_means(losses, self.depth)
        for number in range(count):
            others = [loss["others"][number] for loss in losses]
            chains = [term["reductions"] for term in others]
            depth = _first_of_many(chains)
            if any(len(chain) <= depth for chain in chains):
                return "the reduction of a loss term was not found"
            term = [chain[depth] for chain in chains]
            if len({r["name"] for r in term}) > 1:
                return "micro-steps have different kinds of losses"
            if any(r["gradient"] is None or not np.isfinite(r["gradient"]) for r in term):
                return "the gradient of a loss term is not finite, or did not arrive"
            own, is_mean = self._as_means(others, depth)
            if sum(self.counts) > 1 and any(
                self._divisors(loss, m.divisor) != self._divisors(other, o.divisor)
                for loss, other, m, o in zip(losses, others, main, own, strict=True)
            ):
                return (
                    "one loss term is divided by the number of micro-steps or ranks, another is not"
                )
            is_free = number + 1 in self.free_terms
            if not is_free and is_mean != main_is_mean:
                return "one loss term is a mean, another a sum"
            whole = np.array([o.gradient / m.gradient for o, m in zip(own, main, strict=True)])
            each = whole * [
                m.elements / max(o.elements, 1.0) if is_mean else 1.0
                for o, m in zip(own, main, strict=True)
            ]
            for ratios in (whole,) if is_free else (whole, each):
                if np.ptp(ratios) > EQUAL * np.max(np.abs(ratios)):
                    return "loss terms have other weights to one another in each micro-step"
        return None

    def _reason_of_loss(self, loss: dict[str, Any]) -> str | None:
        if loss["reason"] or len(loss["reductions"]) <= self.depth:
            return loss["reason"] or "the loss's reduction was not found"
        reduction = loss["reductions"][self.depth]
        arrived = reduction["gradient"]
        if arrived is None:
            return "no gradient arrived at the loss's reduction"
        if not np.isfinite(arrived) or not reduction["elements"]:
            return "a loss is not finite, or over nothing"
        if arrived == 0.0:
            return "a loss was multiplied by zero: whether its samples count is not seen"
        return None

    def _reductions(self) -> list[list[dict[str, Any]]]:
        return [[s["loss"]["reductions"][self.depth] for s in w.steps] for w in self.windows]

    def _weights(self) -> list[Array] | None:
        """Return the weight of one element in each micro-step's loss, by ranks."""
        reductions = self._reductions()
        if len({r["name"] for rank in reductions for r in rank}) > 1:
            return None
        signs = {np.sign(r["gradient"]) for rank in reductions for r in rank}
        if len(signs) > 1:
            return None
        return [
            np.array([abs(r["gradient"]) / (r["elements"] if r["is_mean"] else 1.0) for r in rank])
            for rank in reductions
        ]

    def _units(self, counted: str) -> list[Array]:
        """Return how many samples or tokens each micro-step has.

        Args:
            counted: `units` (what counts), `elements`, `rows` (of all models' inputs), or `samples`
                (the rows of one of them: a model may see two views, or two models the same).
        """
        if counted in ("rows", "samples"):
            rows = []
            for window in self.windows:
                per: Counter[int] = Counter()
                for f in window.record["forwards"]:
                    n, before = len(f["rows"]), f["before"]
                    per[before] = per[before] + n if counted == "rows" else max(per[before], n)
                counts = [max(per[number] for number in numbers) for numbers in window.members]
                rows.append(np.array(counts, dtype=float))
            return rows
        return [np.array([float(r[counted]) for r in rank]) for rank in self._reductions()]

    # ------------------------------------------------------------------
    # How the applied gradient came about.

    def _candidates(self) -> Iterator[tuple[str, Array]]:
        """Yield names and coefficients; the update before is in a gradient that is `carried`."""
        average = self.average
        own, last = np.zeros_like(average), np.zeros_like(average)
        own[: self.counts[0]] = average[0] * self.size
        last[np.cumsum(self.counts) - 1] = average[0] * self.size
        yield "average", average
        if self.size > 1:
            yield "sum", average * self.size
            yield "local", own
        yield "carried", average
        yield "last", last / self.size
        if self.size > 1:
            yield "carried", own
            yield "last", np.where(own, last, 0.0)
            yield "last", last
        steps = max(self.counts)
        for times in (1 / steps, float(steps)):
            yield "scaled", average * times

    def _explain(self, applied: Array) -> tuple[Array, str] | None:
        """Return the coefficients of rank 0's applied gradient, and how they were found."""
        matrix = np.concatenate([w.gradients for w in self.windows])
        norms = np.linalg.norm(matrix, axis=1)
        for name, coefficients in self._candidates():
            predicted = coefficients @ matrix
            size = float(np.abs(coefficients) @ norms)
            if name == "carried":
                if self.carried is None:
                    continue
                predicted = predicted + self.carried
                size += float(np.linalg.norm(self.carried))
            if np.linalg.norm(applied - predicted) <= self.tolerance * max(size, 1e-300):
                return coefficients, name
        return self._solve(matrix, norms, applied)

    def _solve(self, matrix: Array, norms: Array, applied: Array) -> tuple[Array, str] | None:
        """Explain `applied` by least squares, as near to a scaled average as possible."""
        start, carried = self.average, self.carried
        if self.weights is not None:
            units = np.concatenate(self._units("units"))
            start = 1.0 / (np.concatenate(self.weights) * max(units.sum(), 1e-300))
        base = start @ matrix
        along = float(applied @ base) / max(float(base @ base), 1e-300)
        start = start * along if along > 0 else start
        # Of length 1, so that least squares does not cut off micro-steps with small gradients.
        rows = matrix / np.maximum(norms, 1e-300)[:, None]
        system = rows
        if carried is not None and carried.any():
            system = np.vstack([rows, carried / np.linalg.norm(carried)])
        rest = applied - start @ matrix
        scale = max(float(np.abs(start) @ norms), float(np.linalg.norm(applied)), 1e-300)
        if np.linalg.norm(rest) <= self.tolerance * scale:
            return start, "scaled"
        if matrix.shape[1] < 2 * len(system):  # so few values would be explained by anything
            return None
        solved = np.linalg.lstsq(system.T, rest, rcond=1e-5)[0]
        residual = rest - solved @ system
        if np.linalg.norm(residual) > self.tolerance * scale:
            return None
        change = solved[: len(rows)] / np.maximum(norms, 1e-300)
        is_carried = (
            carried is not None
            and len(system) > len(rows)
            and abs(solved[-1] / np.linalg.norm(carried) - 1.0) < 0.05
        )
        return start + change, "carried" if is_carried else "solved"

    # ------------------------------------------------------------------
    # The rows.

    def _judge_weights(self, coefficients: Array) -> float | None:
        """Return the weight of an element in the update, if all are alike."""
        if self.weights is None:
            self.say("weights", UNJUDGED, str(self.why))
            return None
        applied = coefficients * np.concatenate(self.weights)
        units = np.concatenate(self._units("units"))
        counted = applied[units > 0]
        if not len(counted):
            self.say("weights", UNJUDGED, "no sample counts")
            return None
        mean = float(np.average(counted, weights=units[units > 0]))
        spread = float(np.max(np.abs(counted - mean))) / max(abs(mean), 1e-300)
        if spread <= EQUAL:
            self.say("weights", RIGHT, "every sample or token counts alike")
            return mean
        low, high = int(np.argmin(applied)), int(np.argmax(applied))
        times = applied[high] / applied[low] if applied[low] > 0 else float("inf")
        text = (
            f"samples of {self._where(high)} count {times:.4g} times as much as those of "
            f"{self._where(low)}"
        )
        self.say("weights", WRONG, text, self._why_unequal(self.weights, coefficients))
        return None

    def _where(self, flat: int) -> str:
        rank = int(np.searchsorted(np.cumsum(self.counts), flat, side="right"))
        step = flat - sum(self.counts[:rank])
        return f"micro-step {step} of rank {rank}" if self.size > 1 else f"micro-step {step}"

    def _why_unequal(self, weights: list[Array], coefficients: Array) -> str:
        if np.any(np.abs(coefficients) < EQUAL * np.max(np.abs(coefficients))):
            return "cleared-each-micro-step" if self._is_cleared() else "last-micro-step-only"
        fewer = len(set(self.counts)) > 1
        of_ranks = self._units("units")
        units = np.concatenate(of_ranks)
        elements, rows = (np.concatenate(self._units(name)) for name in ("elements", "rows"))
        if np.ptp(units) == 0:
            return "fewer-micro-steps" if fewer else "unequal-weights"
        if all(np.ptp(w) <= EQUAL * np.max(w) for w in weights):  # alike within each rank
            if fewer:
                return "fewer-micro-steps"
            if self.size > 1:
                return "mean-of-means-over-ranks"
        # All micro-steps' reductions have one name; see `_weights`.
        ignores_targets = self._reductions()[0][0]["name"].startswith("NllLoss")
        if (ignores_targets or not np.array_equal(units, elements)) and np.ptp(rows) == 0:
            return "padded-tokens"
        last_is_smaller = all(
            len(u) > 1 and np.ptp(u[:-1]) == 0 and u[-1] <= u[0] for u in of_ranks
        )
        return "ragged-micro-batch" if last_is_smaller else "mean-of-means"

    def _is_cleared(self) -> bool:
        """Return whether a gradient was cleared within the window."""
        return any(s["cleared"] for w in self.windows for s in w.steps[1:])

    def times(self) -> dict[str, float]:
        """Return the length of the update divided by that of a mean, for each unit of a mean."""
        level = self.level or 0.0
        is_mean = self._reductions()[0][0]["is_mean"]
        names = ("units",) if is_mean else ("units", "elements", "rows", "samples")
        lengths = {name: level * float(np.concatenate(self._units(name)).sum()) for name in names}
        return lengths if is_mean else {**lengths, "sum": level}

    def counts_first_labels(self, times: float) -> bool:
        """Return whether a loss is divided by one more a sample than its tokens."""
        units, rows = (np.concatenate(self._units(name)) for name in ("units", "rows"))
        seen = rows > 0  # of the first forward pass, inputs that are given by name are not
        if not seen.any() or times >= 1:
            return False
        return bool(abs(times * (1 + rows[seen].sum() / units[seen].sum()) - 1) <= EQUAL)

    def alike_terms(self) -> int:
        """Return how many terms the losses have, if all are alike: an average may be meant."""
        for loss in self._losses():
            main = loss["reductions"][self.depth]
            for term in loss["others"]:
                if not any(
                    r["name"] == main["name"]
                    and r["elements"] == main["elements"]
                    and abs(r["gradient"] - main["gradient"]) <= EQUAL * abs(main["gradient"])
                    for r in term["reductions"]
                ):
                    return 1
        return 1 + len(self._losses()[0]["others"])

    def has_factor(self, times: float) -> bool:
        """Return whether the loss's own factor makes the update `times` as long: one half, or one
        that is no number of micro-steps or ranks, nor an inverse, which may be meant as a divisor.
        """
        steps, size = max(self.counts), self.size
        counts = {steps, size, steps * size, self.usual, self.usual * size} - {1}
        factors = self.windows[0].steps[0]["loss"]["factors"]
        whole = float(np.prod(factors)) / self.windows[0].record["scale"]
        for factor in (*factors, whole):
            inverse = round(1 / factor) if factor else 0
            is_inverse = inverse > 2 and abs(factor * inverse - 1) <= EQUAL
            is_count = any(
                abs(factor / n - 1) <= EQUAL or abs(factor * n - 1) <= EQUAL for n in counts
            )
            if abs(times / factor - 1) <= EQUAL and not is_inverse and not is_count:
                return True
        return False

    def length_fault(self, times: float) -> str | None:
        """Return the fault that makes an update `times` as long as it should be."""
        steps, size = max(self.counts), self.size

        def is_near(value: float) -> bool:
            return value != 1 and abs(times / value - 1) <= EQUAL

        factors = self.windows[0].steps[0]["loss"]["factors"]
        if any(is_near(factor) for factor in factors):
            return None  # it may be a part of the loss
        if times < 1 and self._losses()[0]["others"]:
            return None  # so may a divisor, of an average of terms
        if self.name == "sum" and is_near(size):
            return "sum-over-ranks"
        if len(set(self.counts)) > 1 and is_near(float(np.mean(self.counts)) / self.usual):
            return "fewer-micro-steps"
        if steps < self.usual and is_near(steps / self.usual):
            return "ragged-last-window"
        for value, fault in (
            (steps, "undivided"),
            (1 / steps, "divided-twice"),
            (size, "sum-over-ranks"),
            (1 / size, "averaged-twice"),
            (steps * size, "undivided"),
            (1 / steps / size, "divided-twice"),
            (steps / size, "undivided"),
            (self.usual, "undivided"),
            (1 / self.usual, "divided-twice"),
            (steps / self.usual**2, "divided-twice"),
        ):
            if is_near(value):
                return fault
        return None

    def judge_gradient(self) -> None:
        """Compare the applied gradient with that of one big batch."""
        weights = None if self.is_single else self.weights
        if (weights is None and not self.is_single) or self.applied is None:
            self.say("gradient", UNJUDGED, str(self.why))
            return
        matrix = np.concatenate([w.gradients for w in self.windows])
        shares = self.average
        if weights is not None:
            total = self.total or float(np.concatenate(self._units("units")).sum())
            shares = 1.0 / (np.concatenate(weights) * total)
        true = shares @ matrix
        scale = float(np.abs(shares) @ np.linalg.norm(matrix, axis=1))
        off = max(float(np.linalg.norm(a - true)) for a in self.applied)
        norm = float(np.linalg.norm(true))
        error = off / norm if norm else (float("inf") if off else 0.0)
        length = float(self.applied[0] @ true) / norm**2 if norm else 1.0
        self.judgement.updates.append(
            {
                "update": self.update,
                "micro_steps": self.counts,
                "relative_error": error,
                "length": length,
            }
        )
        state = RIGHT
        if off > self.tolerance * max(scale, 1e-300):
            blamed = any(
                f.update == self.update and f.state == WRONG and f.row in ESSENTIAL
                for f in self.judgement.findings
            )
            state = WRONG if blamed else UNJUDGED
        self.say("gradient", state, f"relative error {error:.1e} against one big batch")

    def _judge_synchrony(self) -> bool:
        """Return whether all ranks apply the same gradient."""
        if self.size == 1:
            self.say("synchrony", RIGHT, "one rank")
            return True
        applied = [w.applied for w in self.windows]
        norm = max(float(np.linalg.norm(a)) for a in applied)
        off = max(float(np.linalg.norm(a - applied[0])) for a in applied)
        same = off <= 1e-6 * max(norm, 1e-300)
        digests = {w.record["weights_sha256"] for w in self.windows}
        if not same:
            floor = OF_GRADIENT * self.windows[0].record["gradient_bytes"]
            reduced = any(size >= floor for size in self._gradient_bytes().values())
            text = f"gradients differ by {off / norm:.2g} of their norm"
            fault = "not-in-step" if reduced else "not-reduced"
            if self.windows[0].record["wrapped"] and not reduced:
                fault = "ddp-not-reducing"
            self.say("synchrony", WRONG, text, fault)
        elif len(digests) > 1:
            self.say("synchrony", WRONG, "ranks hold different weights", "not-in-step")
        else:
            text = "all ranks apply the same gradient and hold the same weights"
            self.say("synchrony", RIGHT, text)
        return same

    def _gradient_bytes(self) -> Counter[int]:
        """Return the bytes that were reduced, by the backward pass in or after which they were."""
        gradient_bytes: Counter[int] = Counter()
        for event in self._reducing():
            gradient_bytes[event["backward"]] += event["bytes"]
        return gradient_bytes

    def _reducing(self) -> list[dict[str, Any]]:
        """Return the collectives that may reduce gradients: DDP's alone if they are whole. Those
        after other optimizers' backward passes are theirs.
        """
        window = self.windows[0]
        own = {number for numbers in window.members for number in numbers}
        events = [event for event in window.record["collectives"] if event["backward"] in own]
        by_ddp = [event for event in events if event["kind"] == "ddp"]
        if sum(event["bytes"] for event in by_ddp) >= OF_GRADIENT * window.record["gradient_bytes"]:
            return by_ddp
        return [event for event in events if event["kind"] in REDUCING]

    def _judge_reductions(self) -> None:
        if self.size == 1:
            self.say("reductions", RIGHT, "one rank: none is needed")
            return
        window = self.windows[0]
        need = window.record["gradient_bytes"]
        by_step = self._gradient_bytes()
        full = [
            i
            for i, numbers in enumerate(window.members)
            if sum(by_step[number] for number in numbers) >= OF_GRADIENT * need
        ]
        sent = by_step.total()
        text = f"{sent} bytes an update, {need} needed; whole gradients in micro-steps {full}"
        if len(full) > 1:
            self.say("reductions", SLOW, text, "reduced-each-micro-step")
        elif not sent and self.several:
            return  # they belong to another optimizer of the same window
        elif not sent:
            others = window.record["collectives"]
            text = ", ".join(sorted({str(event["kind"]) for event in others})) or "no collective"
            self.say("reductions", UNJUDGED, f"no reduction was seen, but {text}")
        else:
            self.say("reductions", RIGHT, text)

    def _judge_clipping(self) -> bool:
        """Return whether the gradient is whole where it is clipped, if it is."""
        record, steps = self.windows[0].record, self.counts[0]
        clips = record["clips"]
        if not clips:
            self.say("clipping", RIGHT, "torch's functions clip nothing before the step")
            return True
        reduced_after = sum(
            event["bytes"] for event in self._reducing() if event["event"] > clips[0]["event"]
        )
        if any(clip["after"] < steps for clip in clips):
            text = f"clipped {len(clips)} times in a window of {steps} micro-steps"
            self.say("clipping", WRONG, text, "clipped-each-micro-step")
        elif CLIPPED_WHILE_SCALED in record["reasons"]:
            self.say("clipping", WRONG, "before unscale_", "clipped-while-scaled")
        elif reduced_after >= OF_GRADIENT * record["gradient_bytes"]:
            self.say("clipping", WRONG, "ranks clip before they reduce", "clipped-before-reduction")
        else:
            self.say("clipping", RIGHT, "once an update, after the reduction")
            return True
        return False

    def _judge_data(self) -> None:
        if self.several and not any(w.record["forwards"] for w in self.windows):
            return  # they belong to another optimizer of the same window
        rows = [
            [row for f in w.record["forwards"] if f["used"] for row in f["rows"]]
            for w in self.windows
        ]
        forwards, used = self.windows[0].record["forwards"], set(rows[0])
        sizes = {len(f["rows"]) for f in forwards if f["used"]}
        dropped = (
            []
            if self.reason
            else [
                # Over as many samples of their own; others may evaluate, or give data.
                f
                for f in forwards
                if not f["used"]
                and len(f["rows"]) in sizes
                and used.isdisjoint(f["rows"])
                and True not in self.data_at.get(tuple(f["lines"]), ())
            ]
        )
        self.dropped = len(dropped)
        is_waste = all(self.data_at.get(tuple(f["lines"])) == {False} for f in dropped)
        lines = [f["lines"] for f in forwards if f["used"]]
        apart = all(f["used"] or f["lines"] not in lines for f in forwards)
        if dropped and is_waste and apart:
            note = "forward passes lead to no loss: waste, unless they are for something else"
            if note not in self.judgement.notes:
                self.judgement.notes.append(note)
        elif dropped:
            text = f"{self.dropped} forward passes of this window have no backward pass"
            # Where several passes count, a discarded one may have been rejected.
            known = is_waste and max(self.counts) == 1
            fault = "last-micro-step-only" if known else None
            self.say("weights", WRONG if known else UNJUDGED, text, fault)
        if self.size == 1 or not all(rows):
            text = "one rank" if self.size == 1 else "the samples were not seen"
            self.say("data", RIGHT if self.size == 1 else UNJUDGED, text)
            return
        if all(sorted(r) == sorted(rows[0]) for r in rows):
            self.say("data", WRONG, "all ranks compute the same samples", "same-data")
            return
        counts = Counter(row for rank in rows for row in set(rank))
        shared = sum(count > 1 for count in counts.values())
        note = f"; {shared} samples are equal on two ranks" if shared else ""
        self.say("data", RIGHT, f"ranks compute different samples{note}")

    def _judge_clearing(self, coefficients: Array) -> None:
        zeros = np.abs(coefficients) < EQUAL * np.max(np.abs(coefficients))
        if any(step["moved"] for window in self.windows for step in window.steps[1:]):
            self.say("clearing", UNJUDGED, str(self.why))
        elif self.name == "carried":
            self.say("clearing", WRONG, "the gradient of the update before is in it", "not-cleared")
        elif self.name in ("last", "solved") and zeros.any() and self._is_cleared():
            text = "only the last micro-step is in the update"
            self.say("clearing", WRONG, text, "cleared-each-micro-step")
        else:
            self.say("clearing", RIGHT, "once an update")


COUNTED = {
    "units": "a mean over samples or tokens",
    "elements": "a mean over elements",
    "rows": "a mean over samples",
    "samples": "a mean over samples",
    "sum": "a sum over samples or tokens",
}


def _judge_lengths(updates: Sequence[_Update]) -> None:
    """Judge the lengths of one optimizer's updates together.

    What a script divides by may fit by chance in one update. A length is right, and a fault is
    named, if all updates of as many micro-steps agree on it.
    """
    if not updates:
        return
    times = [update.times() for update in updates]
    terms = min(update.alike_terms() for update in updates)
    if any(
        terms in (max(update.counts), update.size, max(update.counts) * update.size)
        for update in updates
    ):
        terms = 1  # else a division too many would be taken for that of an average
    for counted in times[0]:
        lengths = [each[counted] for each in times]
        if all(min(abs(value - 1), abs(value * terms - 1)) <= EQUAL for value in lengths):
            for update in updates:
                update.total = 1 / (update.level or 1.0)
                update.say("length", RIGHT, f"the update is that of {COUNTED[counted]}")
            return
    for counted in times[0]:
        lengths = [each[counted] for each in times]
        if counted != "sum" and (counted == "units" or len(updates) > 2):
            faults = _agreed_faults(updates, lengths)
            if faults is None:
                continue
            for update, value, fault in zip(updates, lengths, faults, strict=True):
                update.total = (value if fault else 1.0) / (update.level or 1.0)
                factor = "" if abs(value - 1) <= EQUAL else f", times the loss's own {value:.4g}"
                if fault:
                    update.say("length", WRONG, f"the update is {value:.4g} times as long", fault)
                else:
                    update.say("length", RIGHT, f"the update is that of {COUNTED[counted]}{factor}")
            return
    if all(
        update.counts_first_labels(each["units"])
        for update, each in zip(updates, times, strict=True)
    ):
        shares = [each["units"] for each in times]
        if max(shares) - min(shares) <= EQUAL:
            note = (
                "the loss is divided by all labels, each sentence's first included, which has no "
                "loss; where lengths differ, so do the lengths of updates"
            )
            updates[0].judgement.notes.append(note)
            for update in updates:
                update.total = 1 / (update.level or 1.0)
                update.say("length", RIGHT, "the update is that of a mean over labels")
            return
    _judge_divisors(updates, times)


def _agreed_faults(updates: Sequence[_Update], times: Sequence[float]) -> list[str] | None:
    """Return a fault for each update, "" for none; None where alike updates disagree."""
    groups: dict[tuple[int, ...], set[str | None]] = {}
    for update, value in zip(updates, times, strict=True):
        is_right = abs(value - 1) <= EQUAL or update.has_factor(value)
        fault = "" if is_right else update.length_fault(value)
        groups.setdefault(tuple(update.counts), set()).add(fault)
    if any(len(faults) > 1 or None in faults for faults in groups.values()):
        return None
    return [str(next(iter(groups[tuple(update.counts)]))) for update in updates]


def _judge_divisors(updates: Sequence[_Update], times: Sequence[dict[str, float]]) -> None:
    """Judge lengths that no known count explains: is the divisor at least proportional to one?"""
    columns = [[lengths[counted] for lengths in times] for counted in times[0]]
    varies = len(updates) > 2 and all(
        max(values) - min(values) > EQUAL * max(map(abs, values)) for values in columns
    )
    # A count of something else (objects, say) may be what the loss is meant to be divided by.
    near = all(0.5 <= lengths["units"] <= 2 for lengths in times)
    # A factor of the loss's own that changes, such as a weight that is annealed, is no fault.
    windows = [window for update in updates for window in update.windows]
    factors = {json.dumps(step["loss"]["factors"]) for window in windows for step in window.steps}
    for update, lengths in zip(updates, times, strict=True):
        update.total = lengths["units"] / (update.level or 1.0)
        text = (
            f"the update is divided by {1 / (update.level or 1.0):.6g}, where {update.total:.6g} "
            "samples or tokens have a loss"
        )
        if varies and near and len(factors) == 1 and not any(each.dropped for each in updates):
            update.say("length", WRONG, text, "varying-divisor")
        else:
            update.say("length", UNJUDGED, text)


def _judge_run(
    judgement: Judgement, traces: Sequence[Trace], updates: Sequence[list[JudgedWindow]]
) -> None:
    """Judge the run as a whole: its layers and its environment.

    Args:
        updates: the windows of each update's ranks.
    """
    steps = max((len(window.steps) for ranks in updates for window in ranks), default=1)
    layers = traces[0].end.get("layers", {})
    several = steps > 1 or len(traces) > 1
    norms = layers.get("norms", [])
    if norms and several and not (steps == 1 and norms == ["SyncBatchNorm"]):
        judgement.say("layers", WRONG, f"{', '.join(norms)} sees micro-batches", "batch-norm")
    random = [
        [f["random"] for w in t.windows.values() for f in w.record["forwards"]] for t in traces
    ]
    alike = bool(random[0]) and all(r == random[0] for r in random[1:])
    if layers.get("dropouts") and len(traces) > 1 and alike:
        judgement.notes.append(
            "all ranks draw the same dropout masks, so their noise does not average out; "
            "torch.manual_seed(seed + rank) after the model is built makes them differ"
        )
    _judge_epochs(judgement, [_rows_of_epochs(trace) for trace in traces])
    added_up = [ranks for ranks in updates if sum(len(window.steps) for window in ranks) > 1]
    if added_up:
        _judge_samples(judgement, traces, added_up)
    if not any(f.row == "layers" for f in judgement.findings):
        judgement.say("layers", RIGHT, "no batch norm over micro-batches")
    environment = traces[0].end.get("environment", {})
    judgement.say(
        "environment", RIGHT, ", ".join(f"{name} {value}" for name, value in environment.items())
    )


def _judge_samples(
    judgement: Judgement, traces: Sequence[Trace], updates: Sequence[list[JudgedWindow]]
) -> None:
    """Judge whether samples influence one another, by the micro-steps that were replayed."""
    lines: list[dict[int, tuple[str, ...]]] = [{} for _ in traces]  # of each backward pass
    for ranks in updates:
        for window, own in zip(ranks, lines, strict=True):
            for step in window.steps:
                of_members = step.get("lines_of_members", [step["lines"]])
                numbers = step.get("members", [step["backward"]])
                own.update(zip(numbers, map(tuple, of_members), strict=True))
    probes = [
        [probe for probe in trace.end.get("probes", []) if probe["backward"] in own]
        for trace, own in zip(traces, lines, strict=True)
    ]
    for own, of_rank in zip(lines, probes, strict=True):
        # In the first one, data that the script prepares once look like those of a micro-step.
        later = {own[p["backward"]] for p in of_rank if p["untested"] is None and p["backward"] > 1}
        of_rank[:] = [p for p in of_rank if p["backward"] > 1 or own[p["backward"]] not in later]
    every = [probe for of_rank in probes for probe in of_rank]
    tested = [probe for probe in every if probe["untested"] is None]
    mixed = next((probe["mixed"] for probe in every if probe["mixed"]), None)
    untested = next((probe["untested"] for probe in every if probe["untested"]), None)
    reached = {
        own[probe["backward"]]
        for own, of_rank in zip(lines, probes, strict=True)
        for probe in of_rank
        if probe["untested"] is None
    }
    named = any(f.fault == "batch-norm" for f in judgement.findings)
    if mixed is not None:
        if (verdict := _own_sums(updates, probes)) is not None:
            state, sums = verdict
            # These rows took the elements of the loss for parts of single samples.
            rows = ("weights", "length", "gradient")
            judgement.findings = [f for f in judgement.findings if f.row not in rows]
            text = ", ".join(f"{number:.6g}" for number in sums)
            text = f"micro-batches are divided by sums of their own ({text}): {mixed}"
            judgement.say("weights", state, text, "mean-of-means" if state == WRONG else None)
        elif not named:  # else it is known why
            judgement.say("weights", UNJUDGED, mixed)
    elif missing := {line for own in lines for line in own.values()} - reached:
        text = untested or "whether samples influence one another was not tested"
        judgement.say(
            "weights", UNJUDGED, text if len(missing) == 1 else f"{text} ({_where(min(missing))})"
        )
    elif any(probe["free"] for probe in tested) and not _first_term_is_mean(updates, tested):
        text = "a loss term does not depend on samples, so it counts once in each micro-step"
        judgement.say("weights", UNJUDGED, text)
    elif changed := _changing_constant(updates, lines, probes):
        judgement.say("weights", UNJUDGED, changed)


def _first_term_is_mean(
    updates: Sequence[list[JudgedWindow]], probes: Sequence[dict[str, Any]]
) -> bool:
    """Return whether all first terms are means over samples, beside which a constant term counts
    as in a big batch.
    """
    steps = [step for ranks in updates for window in ranks for step in window.steps]
    means = all(step["loss"]["reductions"][-1]["is_mean"] for step in steps)
    return means and all(0 not in probe["free"] for probe in probes)


def _own_sums(
    updates: Sequence[list[JudgedWindow]], probes: Sequence[list[dict[str, Any]]]
) -> tuple[str, list[float]] | None:
    """Judge windows whose micro-batches are divided by sums of their own: wrong where samples of
    one count more than those of another.

    What arrives at a reduction, divided by that sum, is what a sample's own part of the loss is
    multiplied by.

    Returns:
        The verdict, and the sums of a window that it follows from; None where there are none.
    """
    seen = None
    for ranks in updates:
        for window, of_rank in zip(ranks, probes, strict=True):
            sums = {p["backward"]: p["own_sum"] for p in of_rank if p["own_sum"] is not None}
            steps = [step for step in window.steps if step["backward"] in sums]
            losses = [step["loss"] for step in steps]
            plain = all(
                len(loss["reductions"]) == 1
                and loss["reductions"][0]["gradient"] is not None
                and not (loss["others"] or loss["reason"])
                for loss in losses
            )
            if not plain or len(steps) < 2:
                continue
            numbers = [sums[step["backward"]] for step in steps]
            weights = [
                r["gradient"] / (r["elements"] if r["is_mean"] else 1) / number
                for r, number in zip((x["reductions"][0] for x in losses), numbers, strict=True)
            ]
            if max(weights) - min(weights) > 1e-4 * max(map(abs, weights)):
                return WRONG, numbers
            if max(numbers) - min(numbers) > 1e-4 * max(numbers):
                seen = UNJUDGED, numbers
    return seen


def _changing_constant(
    updates: Sequence[list[JudgedWindow]],
    lines: Sequence[dict[int, tuple[str, ...]]],
    probes: Sequence[list[dict[str, Any]]],
) -> str | None:
    """Return the values, besides data and weights, on which a window's losses depend unequally."""
    for ranks in updates:
        within: dict[tuple[str, ...], list[set[str]]] = {}
        for window, line, of_rank in zip(ranks, lines, probes, strict=True):
            own = {number for numbers in window.members for number in numbers}
            for probe in of_rank:
                if probe["backward"] in own and probe["untested"] is None:
                    constants = within.setdefault(line[probe["backward"]], [])
                    constants.append(set(probe["constants"]))
        for constants in within.values():
            differing = set.union(*constants) - set.intersection(*constants)
            if differing:
                text = min(differing).rpartition("#")[0]
                return f"losses depend on {text}, which changes within a window and was not tested"
    return None


def _rows_of_epochs(trace: Trace) -> list[list[str]]:
    """Return the samples of each whole epoch of the training loader, as digests."""
    loaders = trace.end.get("loaders")
    if not loaders:
        return []
    ends = [*(each["from"] for each in loaders[1:]), trace.end.get("backwards", 0)]
    progress: Counter[int] = Counter()
    for each, end in zip(loaders, ends, strict=True):
        progress[each["loader"]] += end - each["from"]
    [(training, _)] = progress.most_common(1)  # others are for evaluation
    epochs = [each for each in loaders if each["loader"] == training]
    begins = [each["from"] for each in epochs]
    rows: list[list[str]] = [[] for _ in epochs]
    passes = [0] * len(epochs)
    forwards = {f["number"]: f for w in trace.windows.values() for f in w.record["forwards"]}
    for _, forward in sorted(forwards.items()):
        epoch = bisect_left(begins, forward["before"]) - 1
        if forward["used"] and epoch >= 0:
            rows[epoch] += forward["rows"]
            passes[epoch] += 1
    return [r for r, n, each in zip(rows, passes, epochs, strict=True) if n >= each["length"]]


def _judge_epochs(judgement: Judgement, ranks: Sequence[list[list[str]]]) -> None:
    """Judge whether ranks share the samples of an epoch, where all have seen its end."""
    for epoch, rows in enumerate(zip(*ranks, strict=False)):
        counts = Counter(row for rank in rows for row in set(rank))
        if not counts:
            continue
        shared = sum(count > 1 for count in counts.values()) / len(counts)
        distinct_within = all(len(set(rank)) == len(rank) for rank in rows)
        computed = sum(map(len, rows))
        # Ranks that share few samples have those by which a sampler pads.
        if len(rows) > 1 and distinct_within and shared >= 0.5:
            text = f"in epoch {epoch} ranks go through the same {len(counts)} samples"
            judgement.say("data", WRONG, text, "same-data")
        elif computed > len(counts):
            text = f"epoch {epoch}: {computed} samples, {computed - len(counts)} of them repeated"
            judgement.say("data", RIGHT, text)
