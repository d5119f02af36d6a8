"""The verdicts of an audit: pure functions of what was observed.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
CLIPPED_WHILE_SCALED = "clipped before the loss scaler's scale was removed"
RIGHT, WRONG, UNJUDGED = "right", "wrong", "not judged"
ROWS = (
    "weights", "length", "gradient", "synchrony", "reductions", "clearing", "clipping", "schedule",
    "data", "layers", "environment",
)  # fmt: skip
ESSENTIAL = ("weights", "length", "gradient", "synchrony", "clearing", "clipping", "schedule")
EQUAL = 1e-5
"""Weights, and lengths, that differ relatively by less are equal: float32 rounds them."""
TOLERANCE = {
    "torch.float64": 1e-9,
    "torch.float32": 3e-5,
    "torch.bfloat16": 3e-2,
    "torch.float16": 5e-3,
}
REDUCING = ("ddp", "allreduce", "reduce", "reduce_scatter", "_reduce_scatter_base")
MOSTLY_SHARED = 0.5
"""Share of an epoch's samples from which on ranks that share them are not a sampler's padding."""
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
    """

    record: dict[str, Any]
    gradients: Array
    applied: Array
    before_clip: Array | None

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.record["micro_steps"]


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
    """

    findings: list[Finding] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)

    def state(self, row: str) -> str:
        states = [f.state for f in self.findings if f.row == row]
        return WRONG if WRONG in states else UNJUDGED if UNJUDGED in states or not states else RIGHT

    @property
    def faults(self) -> list[str]:
        return list(dict.fromkeys(f.fault for f in self.findings if f.fault))


def read_trace(folder: Path, rank: int) -> Trace:
    """Read what one rank has written. A line that a killed rank has not ended is left out."""
    trace = Trace()
    lines = (folder / f"rank-{rank:05d}.jsonl").read_text().splitlines()
    data = (folder / f"rank-{rank:05d}.bin").open("rb")
    with data:
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
                count = len(record["micro_steps"]) + 1 + record["clipped"]
                data.seek(record["place"])
                values = np.frombuffer(data.read(8 * count * record["values"]))
                rows = values.reshape(count, record["values"])
                steps = len(record["micro_steps"])
                clipped = rows[steps + 1] if record["clipped"] else None
                window = JudgedWindow(record, rows[:steps], rows[steps], clipped)
                trace.windows[record["optimizer"], record["update"]] = window
    return trace


def judge(traces: Sequence[Trace]) -> Judgement:
    """Judge a run by the traces of all its ranks."""
    made = Judgement()
    keys = sorted({key for trace in traces for key in trace.windows})
    whole = [key for key in keys if all(key in trace.windows for trace in traces)]
    if len(whole) < len(keys):
        made.findings.append(Finding(
            "synchrony", WRONG, f"ranks have made different numbers of updates: {len(whole)} are "
            f"common to all, {len(keys) - len(whole)} are not", "not-in-step"))  # fmt: skip
    optimizers = {optimizer for optimizer, _ in whole}
    shared = _same_micro_steps(traces, whole, optimizers)
    depth = _depth(traces, whole)
    usual: dict[int, int] = {}
    for optimizer in optimizers:
        counts = [len(t.windows[k].steps) for t in traces for k in whole if k[0] == optimizer]
        usual[optimizer] = max(counts, default=1)
    judged: dict[int, list[_Update]] = {optimizer: [] for optimizer in optimizers}
    for optimizer, update in whole:
        windows = [trace.windows[optimizer, update] for trace in traces]
        before = [trace.windows.get((optimizer, update - 1)) for trace in traces]
        reason = None if shared else "optimizers step after different micro-steps"
        one = _Update(made, windows, before, update, usual[optimizer], depth, reason)
        one.several = len(optimizers) > 1
        one.judge()
        judged[optimizer].append(one)
    for updates in judged.values():
        _judge_lengths([one for one in updates if one.level is not None])
        for one in updates:
            one.judge_gradient()
    _judge_run(made, traces, whole)
    return made


def _same_micro_steps(
    traces: Sequence[Trace], keys: Sequence[tuple[int, int]], optimizers: set[int]
) -> bool:
    """Return whether all optimizers step after the same micro-steps."""
    if len(optimizers) < 2:
        return True
    found: dict[int, list[list[int]]] = {}
    for optimizer, update in keys:
        steps = [s["backward"] for s in traces[0].windows[optimizer, update].steps]
        found.setdefault(optimizer, []).append(steps)
    return len({json.dumps(steps) for steps in found.values()}) == 1


def _steps(traces: Sequence[Trace], keys: Sequence[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for trace in traces:
        for key in keys:
            yield from trace.windows[key].steps


def _depth(traces: Sequence[Trace], keys: Sequence[tuple[int, int]]) -> int:
    """Return which reduction of the losses is over samples: the first that has several elements."""
    depths = []
    for step in _steps(traces, keys):
        reductions = step["loss"]["reductions"]
        if not reductions:
            continue
        many = [i for i, reduction in enumerate(reductions) if reduction["elements"] > 1]
        depths.append(many[0] if many else len(reductions) - 1)
    return min(depths, default=0)


class _Update:
    """The judgement of one update of one optimizer."""

    def __init__(
        self, made: Judgement, windows: list[JudgedWindow], before: list[JudgedWindow | None],
        update: int, usual: int, depth: int, reason: str | None,
    ) -> None:  # fmt: skip
        self.made, self.windows, self.before = made, windows, before
        self.update, self.usual, self.depth, self.reason = update, usual, depth, reason
        self.size = len(windows)
        if len({len(window.applied) for window in windows}) > 1:
            self.reason = "ranks have different parameters"
        self.dropped = 0  # forward passes without a backward pass
        self.several = False  # there are other optimizers
        self.name = ""  # how the applied gradient came about
        self.level: float | None = None  # the weight of a sample or token, if all have the same
        self.total: float | None = None  # the number of samples or tokens that it divides by
        self.applied: list[Array] | None = None
        self.weights: list[Array] | None = None
        self.why: str | None = None
        dtypes = {dtype for w in windows for dtype in w.record["dtypes"]}
        self.tolerance = max((TOLERANCE.get(dtype, 3e-2) for dtype in dtypes), default=3e-2)
        self.counts = [len(w.steps) for w in windows]

    def say(self, row: str, state: str, text: str, fault: str | None = None) -> None:
        self.made.findings.append(Finding(row, state, text, fault, self.update))

    def judge(self) -> None:
        self._judge_reductions()
        clip = self._judge_clipping()
        self._judge_schedule()
        self._judge_data()
        self.why = self._reason()
        self.weights = None if self.why else self._weights()
        if self.weights is None and self.why is None:
            self.why = "micro-steps have different kinds of losses"
        if self.reason or not all(self.counts) or any(map(self._reasons, self.windows)):
            for row in ("weights", "length", "clearing", "synchrony"):
                self.say(row, UNJUDGED, str(self.why))
            return
        same = self._judge_synchrony([w.applied for w in self.windows])
        reason = "it was clipped before it was whole"
        found = self._natural()  # where the applied gradient cannot be explained
        if clip is None:
            self.applied = [
                w.applied if w.before_clip is None else w.before_clip for w in self.windows
            ]
            explained = self._explain(self.applied, self.weights, same)
            if explained is None:
                reason = (
                    "the applied gradient is no sum of the micro-steps': changed by hand or a hook"
                )
                self.applied = None
                self.say("clearing", UNJUDGED, reason)
            else:
                found, self.name = explained
                self._judge_clearing(found, self.name)
                if self.name == "local" and self.size > 1 and not same:
                    found = self._natural()
        else:
            self.say("clearing", RIGHT, "once an update")
        self.level = self._judge_weights(self.weights, found, self.why)
        if self.applied is None:
            self.level, self.why = None, self.why or reason
        if self.level is None:
            self.say("length", UNJUDGED, self.why or "samples count differently")

    # ------------------------------------------------------------------

    def _reason(self) -> str | None:
        """Return why this update's weights cannot be judged."""
        reasons = [self.reason]
        for window in self.windows:
            reasons += self._reasons(window)
            if not window.steps:
                reasons.append("an update without a backward pass")
            reasons += [self._reason_of_loss(step["loss"]) for step in window.steps]
        return next((reason for reason in reasons if reason), None)

    def _reasons(self, window: JudgedWindow) -> list[str]:
        return [r for r in window.record["reasons"] if r != CLIPPED_WHILE_SCALED]

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
            np.array([
                abs(r["gradient"]) / (r["elements"] if r["is_mean"] else 1.0) for r in rank
            ])
            for rank in reductions
        ]  # fmt: skip

    def _units(self, counted: str) -> list[Array]:
        """Return how many samples or tokens each micro-step has.

        Args:
            counted: `units` (what counts), `elements`, or `rows` (of the model's inputs).
        """
        if counted == "rows":
            rows = []
            for window in self.windows:
                forwards = window.record["forwards"]
                per = {s["backward"]: 0 for s in window.steps}
                for f in forwards:
                    if f["before"] in per:
                        per[f["before"]] += len(f["rows"])
                rows.append(np.array(list(per.values()), dtype=float))
            return rows
        return [np.array([float(r[counted]) for r in rank]) for rank in self._reductions()]

    # ------------------------------------------------------------------
    # How the applied gradient came about.

    def _flat(self, per_rank: Sequence[Array]) -> Array:
        return np.concatenate(list(per_rank)) if per_rank else np.zeros(0)

    def _natural(self) -> Array:
        """Return the coefficients of an average over ranks."""
        scale = self.windows[0].record["scale"]
        return np.full(sum(self.counts), 1.0 / self.size / scale)

    def _candidates(self, rank: int) -> Iterator[tuple[str, Array, float]]:
        """Yield names, coefficients and the coefficient of the update before."""
        n, scale = sum(self.counts), self.windows[0].record["scale"]
        ends = np.cumsum(self.counts)
        own = np.zeros(n)
        own[ends[rank] - self.counts[rank] : ends[rank]] = 1 / scale
        last = np.zeros(n)
        last[ends - 1] = 1 / scale
        average = self._natural()
        yield "average", average, 0.0
        if self.size > 1:
            yield "sum", average * self.size, 0.0
            yield "local", own, 0.0
        yield "carried", average, 1.0
        yield "last", last / self.size, 0.0
        if self.size > 1:
            yield "carried", own, 1.0
            yield "last", last * own * scale, 0.0
            yield "last", last, 0.0
        steps = max(self.counts)
        for times in (1 / steps, float(steps)):
            yield "scaled", average * times, 0.0

    def _explain(
        self, applied: list[Array], weights: list[Array] | None, same: bool
    ) -> tuple[Array, str] | None:
        """Return the coefficients of rank 0's applied gradient, and how they were found."""
        matrix = np.concatenate([w.gradients for w in self.windows])
        before = self.before[0]
        carried = before.applied if before is not None else None
        norms = np.linalg.norm(matrix, axis=1)
        for name, coefficients, carry in self._candidates(0):
            if carry and carried is None:
                continue
            if (
                name == "local"
                and same
                and self.size > 1
                and not np.allclose(applied[0], applied[-1], rtol=0, atol=0)
            ):
                continue
            predicted = coefficients @ matrix
            size = float(np.abs(coefficients) @ norms)
            if carry and carried is not None:
                predicted = predicted + carried
                size += float(np.linalg.norm(carried))
            if np.linalg.norm(applied[0] - predicted) <= self.tolerance * max(size, 1e-300):
                return coefficients, name
        return self._solve(matrix, norms, applied[0], carried, weights)

    def _solve(
        self, matrix: Array, norms: Array, applied: Array,
        carried: Array | None, weights: list[Array] | None,
    ) -> tuple[Array, str] | None:  # fmt: skip
        """Explain `applied` by least squares, as near to a scaled average as possible."""
        start = self._natural()
        if weights is not None:
            units = self._flat(self._units("units"))
            start = 1.0 / (self._flat(weights) * max(units.sum(), 1e-300))
        base = start @ matrix
        along = float(applied @ base) / max(float(base @ base), 1e-300)
        start = start * along if along > 0 else start
        rows = matrix / np.maximum(norms, 1e-300)[:, None]
        extra = [] if carried is None or not carried.any() else [carried / np.linalg.norm(carried)]
        system = np.concatenate([rows, np.array(extra)]) if extra else rows
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
        carry = (
            solved[len(rows)] / np.linalg.norm(carried) if extra and carried is not None else 0.0
        )
        change = solved[: len(rows)] / np.maximum(norms, 1e-300)
        return start + change, "carried" if abs(carry - 1.0) < 0.05 else "solved"

    # ------------------------------------------------------------------
    # The rows.

    def _judge_weights(
        self, weights: list[Array] | None, coefficients: Array, why: str | None
    ) -> float | None:
        """Return the weight of an element in the update, if all are alike."""
        if weights is None:
            self.say("weights", UNJUDGED, str(why))
            return None
        applied = coefficients * self._flat(weights)
        units = self._flat(self._units("units"))
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
        self.say("weights", WRONG, text, self._why_unequal(weights, coefficients))
        return None

    def _where(self, flat: int) -> str:
        rank = int(np.searchsorted(np.cumsum(self.counts), flat, side="right"))
        step = flat - sum(self.counts[:rank])
        return f"micro-step {step} of rank {rank}" if self.size > 1 else f"micro-step {step}"

    def _why_unequal(self, weights: list[Array], coefficients: Array) -> str:
        if np.any(np.abs(coefficients) < EQUAL * np.max(np.abs(coefficients))):
            cleared = any(s["cleared"] for w in self.windows for s in w.steps[1:])
            return "cleared-each-micro-step" if cleared else "last-micro-step-only"
        flat = self._flat(weights)
        units, elements = self._units("units"), self._units("elements")
        if np.ptp(self._flat(units)) == 0:
            return "fewer-micro-steps" if len(set(self.counts)) > 1 else "unequal-weights"
        masked = any(
            s["loss"]["reductions"][self.depth]["name"].startswith("NllLoss")
            for w in self.windows for s in w.steps
        ) or not np.array_equal(self._flat(units), self._flat(elements))  # fmt: skip
        rows = self._flat(self._units("rows"))
        within = any(np.ptp(w) > EQUAL * np.max(w) for w in weights)
        if len(set(self.counts)) > 1 and not within:
            return "fewer-micro-steps"
        if not within and self.size > 1:
            return "mean-of-means-over-ranks"
        del flat
        if masked and (not rows.any() or np.ptp(rows) == 0):
            return "padded-tokens"
        return "ragged-micro-batch" if self._last_alone_is_smaller(units) else "mean-of-means"

    def _last_alone_is_smaller(self, units: list[Array]) -> bool:
        return all(
            len(u) > 1 and np.ptp(u[:-1]) == 0 and u[-1] <= u[0] for u in units
        )  # fmt: skip

    def steps(self) -> Iterator[dict[str, Any]]:
        for window in self.windows:
            yield from window.steps

    def times(self) -> dict[str, float]:
        """Return the length of the update divided by that of a mean, by what the mean may count."""
        level = self.level or 0.0
        found = {"units": level * float(self._flat(self._units("units")).sum())}
        if not self._reductions()[0][0]["is_mean"]:
            found["elements"] = level * float(self._flat(self._units("elements")).sum())
            found["rows"] = level * float(self._flat(self._units("rows")).sum())
            found["sum"] = level
        return found

    def length_fault(self, times: float) -> str | None:
        """Return the fault that makes an update `times` as long as it should be."""
        steps, size = max(self.counts), self.size

        def is_near(value: float) -> bool:
            return value != 1 and abs(times / value - 1) <= EQUAL

        factors = self.windows[0].steps[0]["loss"]["factors"]
        if any(is_near(factor) for factor in factors):
            return None  # it may be a part of the loss
        if self.name == "sum" and is_near(size):
            return "sum-over-ranks"
        if len(set(self.counts)) > 1 and is_near(float(np.mean(self.counts)) / self.usual):
            return "fewer-micro-steps"
        if steps < self.usual and is_near(steps / self.usual):
            return "ragged-last-window"
        for value, fault in (
            (steps, "undivided"), (1 / steps, "divided-twice"), (size, "sum-over-ranks"),
            (1 / size, "averaged-twice"), (steps * size, "undivided"),
            (1 / steps / size, "divided-twice"), (steps / size, "undivided"),
            (self.usual, "undivided"), (1 / self.usual, "divided-twice"),
            (steps / self.usual**2, "divided-twice"),
        ):  # fmt: skip
            if is_near(value):
                return fault
        return None

    def judge_gradient(self) -> None:
        """Compare the applied gradient with that of one big batch."""
        if self.weights is None or self.applied is None:
            self.say("gradient", UNJUDGED, str(self.why))
            return
        matrix = np.concatenate([w.gradients for w in self.windows])
        total = self.total or float(self._flat(self._units("units")).sum())
        shares = 1.0 / (self._flat(self.weights) * total)
        true = shares @ matrix
        scale = float(np.abs(shares) @ np.linalg.norm(matrix, axis=1))
        off = max(float(np.linalg.norm(a - true)) for a in self.applied)
        norm = float(np.linalg.norm(true))
        error = off / norm if norm else (float("inf") if off else 0.0)
        length = float(self.applied[0] @ true) / norm**2 if norm else 1.0
        self.made.updates.append({
            "update": self.update, "micro_steps": self.counts, "relative_error": error,
            "length": length,
        })  # fmt: skip
        if off <= self.tolerance * max(scale, 1e-300):
            self.say("gradient", RIGHT, f"relative error {error:.1e} against one big batch")
            return
        blamed = any(
            f.update == self.update and f.state == WRONG and f.row in ESSENTIAL
            for f in self.made.findings
        )
        self.say(
            "gradient", WRONG if blamed else UNJUDGED,
            f"relative error {error:.2g} against one big batch",
        )  # fmt: skip

    def _judge_synchrony(self, applied: list[Array]) -> bool:
        """Return whether all ranks apply the same gradient."""
        if self.size == 1:
            self.say("synchrony", RIGHT, "one rank")
            return True
        norm = max(float(np.linalg.norm(a)) for a in applied)
        off = max(float(np.linalg.norm(a - applied[0])) for a in applied)
        same = off <= 1e-6 * max(norm, 1e-300)
        digests = {w.record["weights_sha256"] for w in self.windows}
        if same and len(digests) == 1:
            self.say(
                "synchrony", RIGHT, "all ranks apply the same gradient and hold the same weights"
            )
            return True
        if not same:
            fault = "not-in-step" if self._reduced() else "not-reduced"
            self.say(
                "synchrony", WRONG, f"gradients differ by {off / norm:.2g} of their norm", fault
            )
        else:
            self.say("synchrony", WRONG, "ranks hold different weights", "not-in-step")
        return same

    def _gradient_bytes(self, rank: int) -> dict[int, int]:
        """Return the bytes that were reduced, by the backward pass in or after which they were."""
        found: dict[int, int] = {}
        for event in self.windows[rank].record["collectives"]:
            if event["kind"] in REDUCING:
                found[event["backward"]] = found.get(event["backward"], 0) + event["bytes"]
        return found

    def _reduced(self) -> bool:
        floor = OF_GRADIENT * self.windows[0].record["gradient_bytes"]
        return any(size >= floor for size in self._gradient_bytes(0).values())

    def _judge_reductions(self) -> None:
        if self.size == 1:
            self.say("reductions", RIGHT, "one rank: none is needed")
            return
        window = self.windows[0]
        need = window.record["gradient_bytes"]
        steps = [s["backward"] for s in window.steps]
        by_step = self._gradient_bytes(0)
        full = [i for i, b in enumerate(steps) if by_step.get(b, 0) >= OF_GRADIENT * need]
        sent = sum(by_step.values())
        text = f"{sent} bytes an update, {need} needed; whole gradients in micro-steps {full}"
        if len(full) > 1:
            self.say("reductions", WRONG, text, "reduced-each-micro-step")
        elif not sent and self.several:
            return  # they belong to another optimizer of the same window
        elif not sent:
            others = window.record["collectives"]
            text = ", ".join(sorted({str(event["kind"]) for event in others})) or "no collective"
            self.say("reductions", UNJUDGED, f"no reduction was seen, but {text}")
        else:
            self.say("reductions", RIGHT, text)

    def _judge_clipping(self) -> str | None:
        """Return the fault of clipping, if it acts on a gradient that is not whole."""
        window = self.windows[0]
        clips = window.record["clips"]
        steps = len(window.steps)
        if not clips:
            self.say("clipping", RIGHT, "the gradient is not clipped")
            return None
        if any(clip["after"] < steps for clip in clips):
            text = f"clipped {len(clips)} times in a window of {steps} micro-steps"
            self.say("clipping", WRONG, text, "clipped-each-micro-step")
            return "clipped-each-micro-step"
        if CLIPPED_WHILE_SCALED in window.record["reasons"]:
            self.say("clipping", WRONG, "before unscale_", "clipped-while-scaled")
            return "clipped-while-scaled"
        if self._reduced_after_clip():
            self.say("clipping", WRONG, "ranks clip before they reduce", "clipped-before-reduction")
            return "clipped-before-reduction"
        self.say("clipping", RIGHT, "once an update, after the reduction")
        return None

    def _reduced_after_clip(self) -> bool:
        record = self.windows[0].record
        first = record["clips"][0]["event"]
        after = sum(
            e["bytes"]
            for e in record["collectives"]
            if e["kind"] in REDUCING and e["event"] > first
        )
        return after >= OF_GRADIENT * record["gradient_bytes"]

    def _judge_schedule(self) -> None:
        window = self.windows[0]
        steps = len(window.steps)
        inside = {s["after"] for s in window.record["schedules"] if 0 < s["after"] < steps}
        rates = [step["lr"] for step in window.steps]
        changed = sum(a != b for a, b in pairwise(rates))
        if (steps > 1 and len(inside) >= max(1, (steps - 1) // 2)) or changed:
            text = f"the learning rate changes within a window of {steps} micro-steps"
            self.say("schedule", WRONG, text, "schedule-each-micro-step")
        else:
            self.say("schedule", RIGHT, "the learning rate is one value in each window")

    def _judge_data(self) -> None:
        if self.several and not any(w.record["forwards"] for w in self.windows):
            return  # they belong to another optimizer of the same window
        rows = [
            [row for f in w.record["forwards"] if f["used"] for row in f["rows"]]
            for w in self.windows
        ]
        dropped = self.dropped = 0 if self.reason else self._dropped_forwards()
        if dropped:
            self.say(
                "weights", WRONG, f"{dropped} forward passes of this window have no backward pass",
                "last-micro-step-only",
            )  # fmt: skip
        if self.size == 1 or not all(rows):
            text = "one rank" if self.size == 1 else "the samples were not seen"
            self.say("data", RIGHT if self.size == 1 else UNJUDGED, text)
            return
        if all(sorted(r) == sorted(rows[0]) for r in rows):
            self.say("data", WRONG, "all ranks compute the same samples", "same-data")
            return
        counts: dict[str, int] = {}
        for rank in rows:
            for row in set(rank):
                counts[row] = counts.get(row, 0) + 1
        shared = sum(count > 1 for count in counts.values())
        note = f"; {shared} samples are equal on two ranks" if shared else ""
        self.say("data", RIGHT, f"ranks compute different samples{note}")

    def _dropped_forwards(self) -> int:
        """Return how many forward passes over samples of their own were not differentiated."""
        forwards = self.windows[0].record["forwards"]
        used = {row for f in forwards if f["used"] for row in f["rows"]}
        return sum(
            not f["used"] and bool(f["rows"]) and used.isdisjoint(f["rows"]) for f in forwards
        )

    def _judge_clearing(self, coefficients: Array, name: str) -> None:
        if name == "carried":
            self.say("clearing", WRONG, "the gradient of the update before is in it", "not-cleared")
            return
        cleared = any(s["cleared"] for w in self.windows for s in w.steps[1:])
        zeros = np.abs(coefficients) < EQUAL * np.max(np.abs(coefficients))
        if name in ("last", "solved") and zeros.any() and cleared and max(self.counts) > 1:
            self.say("clearing", WRONG, "only the last micro-step is in the update",
                     "cleared-each-micro-step")  # fmt: skip
            return
        self.say("clearing", RIGHT, "once an update")


COUNTED = {
    "units": "a mean over samples or tokens", "elements": "a mean over elements",
    "rows": "a mean over samples", "sum": "a sum over samples or tokens",
}  # fmt: skip


def _judge_lengths(updates: Sequence[_Update]) -> None:
    """Judge the lengths of one optimizer's updates together.

    What a script divides by may fit by chance in one update. A length is right, and a fault is
    named, if all updates of as many micro-steps agree on it.
    """
    if not updates:
        return
    times = [one.times() for one in updates]
    for counted in times[0]:
        found = [each[counted] for each in times]
        if all(abs(value - 1) <= EQUAL for value in found):
            for one in updates:
                one.total = 1 / (one.level or 1.0)
                one.say("length", RIGHT, f"the update is that of {COUNTED[counted]}")
            return
    for counted in times[0]:
        found = [each[counted] for each in times]
        if counted != "sum" and (counted == "units" or len(updates) > 2):
            faults = _agreed_faults(updates, found)
            if faults is not None:
                _say_faults(updates, found, faults, COUNTED[counted])
                return
    _judge_divisors(updates, times)


def _agreed_faults(updates: Sequence[_Update], times: Sequence[float]) -> list[str] | None:
    """Return a fault for each update, "" for none; None where alike updates disagree."""
    groups: dict[tuple[int, ...], set[str | None]] = {}
    for one, value in zip(updates, times, strict=True):
        fault = "" if abs(value - 1) <= EQUAL else one.length_fault(value)
        groups.setdefault(tuple(one.counts), set()).add(fault)
    if any(len(faults) > 1 or None in faults for faults in groups.values()):
        return None
    return [str(next(iter(groups[tuple(one.counts)]))) for one in updates]


def _say_faults(
    updates: Sequence[_Update], times: Sequence[float], faults: Sequence[str], mean: str
) -> None:
    for one, value, fault in zip(updates, times, faults, strict=True):
        one.total = value / (one.level or 1.0)
        if fault:
            one.say("length", WRONG, f"the update is {value:.4g} times as long", fault)
        else:
            one.say("length", RIGHT, f"the update is that of {mean}")


def _judge_divisors(updates: Sequence[_Update], times: Sequence[dict[str, float]]) -> None:
    """Judge lengths that no known count explains: is the divisor at least proportional to one?"""
    varies = len(updates) > 2 and not any(
        _is_steady([found[counted] for found in times]) for counted in times[0]
    )
    # A factor of the loss's own that changes, such as a weight that is annealed, is no fault.
    factors = {json.dumps(step["loss"]["factors"]) for one in updates for step in one.steps()}
    for one, found in zip(updates, times, strict=True):
        one.total = found["units"] / (one.level or 1.0)
        text = (
            f"the update is divided by {1 / (one.level or 1.0):.6g}, where {one.total:.6g} samples "
            "or tokens have a loss"
        )
        if varies and len(factors) == 1 and not any(each.dropped for each in updates):
            one.say("length", WRONG, text, "varying-divisor")
        else:
            one.say("length", UNJUDGED, text)


def _is_steady(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= EQUAL * max(map(abs, values))


def _judge_run(made: Judgement, traces: Sequence[Trace], keys: Sequence[tuple[int, int]]) -> None:
    """Judge what belongs to the run as a whole: layers, and the environment."""
    layers = traces[0].end.get("layers", {})
    steps = max((len(t.windows[k].steps) for t in traces for k in keys), default=1)
    several = steps > 1 or len(traces) > 1
    norms = layers.get("norms", [])
    if norms and several and not (steps == 1 and norms == ["SyncBatchNorm"]):
        made.findings.append(Finding(
            "layers", WRONG, f"{', '.join(norms)} sees micro-batches", "batch-norm"))  # fmt: skip
    random = [
        [f["random"] for w in t.windows.values() for f in w.record["forwards"]] for t in traces
    ]
    if layers.get("dropouts") and len(traces) > 1 and all(r == random[0] for r in random[1:]):
        text = "dropout draws the same numbers on all ranks"
        made.findings.append(Finding("layers", WRONG, text, "same-dropout"))
    _judge_epochs(made, [_rows_of_epochs(trace) for trace in traces])
    if "mixed" in layers:
        made.findings.append(Finding("weights", UNJUDGED, layers["mixed"]))
    if "unprobed" in layers and "mixed" not in layers:
        made.findings.append(Finding("weights", UNJUDGED, layers["unprobed"]))
    if not any(f.row == "layers" for f in made.findings):
        made.findings.append(Finding("layers", RIGHT, "no layer sees other samples"))
    found = traces[0].end.get("environment", {})
    text = ", ".join(f"{name} {value}" for name, value in found.items())
    made.findings.append(Finding("environment", RIGHT, text))


def _rows_of_epochs(trace: Trace) -> list[list[str]]:
    """Return the samples of each whole epoch of the training loader, as digests."""
    loaders = trace.end.get("loaders")
    if not loaders:
        return []
    ends = [*(each["from"] for each in loaders[1:]), trace.end.get("backwards", 0)]
    progress: dict[int, int] = {}  # others are for evaluation
    for each, end in zip(loaders, ends, strict=True):
        progress[each["loader"]] = progress.get(each["loader"], 0) + end - each["from"]
    training = max(progress, key=progress.__getitem__)
    epochs = [each for each in loaders if each["loader"] == training]
    begins = [each["from"] for each in epochs]
    rows: list[list[str]] = [[] for _ in epochs]
    passes = [0] * len(epochs)
    for window in trace.windows.values():
        for forward in window.record["forwards"]:
            epoch = bisect_left(begins, forward["before"]) - 1
            if forward["used"] and epoch >= 0:
                rows[epoch] += forward["rows"]
                passes[epoch] += 1
    return [r for r, n, each in zip(rows, passes, epochs, strict=True) if n >= each["length"]]


def _judge_epochs(made: Judgement, ranks: Sequence[list[list[str]]]) -> None:
    """Judge whether ranks share the samples of an epoch, where all have seen its end."""
    for epoch, rows in enumerate(zip(*ranks, strict=False)):
        counts = Counter(row for rank in rows for row in set(rank))
        if not counts:
            continue
        shared = sum(count > 1 for count in counts.values()) / len(counts)
        distinct_within = all(len(set(rank)) == len(rank) for rank in rows)
        computed = sum(map(len, rows))
        if len(rows) > 1 and distinct_within and shared >= MOSTLY_SHARED:
            text = f"in epoch {epoch} ranks go through the same {len(counts)} samples"
            made.findings.append(Finding("data", WRONG, text, "same-data"))
        elif computed > len(counts):
            text = f"epoch {epoch}: {computed} samples, {computed - len(counts)} of them repeated"
            made.findings.append(Finding("data", RIGHT, text))
