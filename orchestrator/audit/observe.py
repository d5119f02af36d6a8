"""Observation of an unmodified training script, from inside its process.

`python -m orchestrator.audit SCRIPT ARGUMENTS` runs a script and writes down what every
update consists of: the micro-steps' own gradients before any reduction, the weight of a sample in
each loss, the gradient that the optimizer applies, clipping, schedules, and collectives. Nothing is
judged here (see `judge`), and nothing is sent: each rank writes files in the audit's folder.

A gradient is kept as values at up to `MOST_VALUES` positions, the same on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import os
import runpy
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from orchestrator.audit import FAKE_CUDA, FILES, FOLDER, UPDATES
from orchestrator.audit.judge import CLIPPED_WHILE_SCALED, Array
from orchestrator.audit.loss_graph import LossGraph, is_compiled, read_loss
from orchestrator.audit.scratch import CopyOnWrite
from orchestrator.audit.separability import (
    UNCHANGED,
    Operation,
    Probe,
    Recorder,
    Replay,
    compare_samples,
    find_reductions,
    own_sum,
    script_lines,
)

MOST_VALUES = 2**17
"""Of a gradient that are kept. Models with fewer parameters are compared whole."""
UPDATES_BY_DEFAULT, MOST_UPDATES = 8, 64
PROBED_MICRO_STEPS, MOST_PROBES = 3, 8
"""So many of each line with a backward pass, besides the run's first, are replayed; those that
cannot be are tried so often. Where a window has several micro-steps, two of three neighbours are of
one window."""
MOST_PROBED_LINES = 8
MOST_OUTPUTS = 32
"""Forward passes whose outputs are kept, to see whether other passes' losses depend on them."""
MOST_STATE_VALUES = 1024
"""Of a frozen tensor that are compared between micro-steps and ranks."""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
HORIZONS = (
    "total_steps",
    "T_max",
    "T_0",
    "total_iters",
    "step_size",
    "step_size_up",
    "step_size_down",
)
"""Attributes of schedulers that count their steps."""
COLLECTIVES = (
    "allreduce",
    "reduce",
    "broadcast",
    "allgather",
    "_allgather_base",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall_base",
)
"""Methods of process groups, through which functions of torch.distributed go, too."""


@dataclass
class ObservedWindow:
    """The micro-steps of one optimizer since its last update."""

    micro_steps: list[dict[str, Any]] = field(default_factory=list)
    columns: list[Array] = field(default_factory=list)
    clips: list[dict[str, Any]] = field(default_factory=list)
    before_clip: Array | None = None
    schedules: list[int] = field(default_factory=list)  # micro-steps before each step of one
    scale: float = 1.0
    is_unscaled: bool = False
    reasons: list[str] = field(default_factory=list)
    weights: Array | None = None  # at the newest micro-step
    forwards: list[dict[str, Any]] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)


class TrackedOptimizer:
    """One optimizer: its parameters, and where its gradients are sampled."""

    def __init__(self, index: int, optimizer: Optimizer) -> None:
        self.index, self.optimizer = index, optimizer
        self.parameters: list[nn.Parameter] = []
        self.hooked: dict[int, int] = {}  # the hook's key, by the parameter's number
        self.positions: list[tuple[int, slice]] = []
        self.updates = 0
        self.window = ObservedWindow()
        self.backward = -1  # the backward pass of the newest micro-step
        self.closure_calls = 0
        self.horizons: set[str] = set()  # of its schedules, which may count micro-steps
        self.applied = np.zeros(0)  # the gradient that the newest step applies
        self.is_part = False  # it steps a part of another one's parameters, within its step
        self.reason: str | None = None  # why its updates cannot be judged

    def choose_positions(self) -> None:
        """Choose positions in each parameter: all, or every n-th of a large model."""
        total = sum(p.numel() for p in self.parameters)
        begin, self.positions = 0, []
        for p in self.parameters:
            share = p.numel() * MOST_VALUES // max(total, 1)
            wanted = min(p.numel(), max(16, share))
            step = -(-p.numel() // max(wanted, 1)) | 1 if total > MOST_VALUES else 1
            values = -(-p.numel() // max(step, 1))
            self.positions.append((step, slice(begin, begin + values)))
            begin += values

    @property
    def values(self) -> int:
        return self.positions[-1][1].stop if self.positions else 0

    def sample(self, tensors: Iterable[Tensor | None]) -> Array:
        column = np.zeros(self.values)
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                self.put(column, i, tensor)
        return column

    def put(self, column: Array, i: int, tensor: Tensor) -> None:
        step, where = self.positions[i]
        # With reentrant checkpoints a gradient comes in parts.
        column[where] += tensor.detach().reshape(-1)[::step].double().cpu().numpy()


class Observer:
    """Everything that is observed in one process."""

    def __init__(self, folder: Path, updates: int | None, rank: int) -> None:
        self.rank, self.pid = rank, os.getpid()
        self.ends_process = True
        self.in_backward = self.in_hook = False
        self.recorder = Recorder()
        self.begin(folder, updates)

    def begin(self, folder: Path, updates: int | None) -> None:
        """Observe the following micro-steps as a run of its own."""
        self.folder, self.updates = folder, updates
        self.optimizers: dict[int, TrackedOptimizer] = {}
        self.of_parameter: dict[int, list[tuple[TrackedOptimizer, int]]] = {}
        self.backwards = self.depth = self.forward_count = 0
        self.fetched = 0  # micro-batches that loaders have given
        self.processes = 0  # started by the script, besides its loaders' workers
        self.lines_of_backward: tuple[str, ...] = ()
        self.probes: dict[tuple[str, ...], list[Probe]] = {}  # by the lines of backward passes
        self.modules: dict[int, nn.Module] = {}  # outermost ones that were called
        self.state: dict[str, str] = {}  # digests of their tensors but the trained weights
        self.events = 0  # clippings and collectives so far
        self.own_clip: float | None = None  # the factor of the accumulator's clip_norm
        self.wrapped: list[Any] = []  # models of DDP
        self.loss: LossGraph | None = None
        self.stepping: list[TrackedOptimizer] = []  # optimizers, the innermost last
        self.forwards: list[dict[str, Any]] = []  # since any optimizer's newest step
        # Without their graphs, since any optimizer's newest step.
        self.outputs: deque[tuple[dict[str, Any], list[Tensor]]] = deque(maxlen=MOST_OUTPUTS)
        self.given_by_name: set[int] = set()
        self.layers: dict[str, Any] = {"norms": set(), "dropouts": 0}
        self.loaders: list[dict[str, Any]] = []
        self.lines = (folder / f"rank-{self.rank:05d}.jsonl").open("a")
        self.data = (folder / f"rank-{self.rank:05d}.bin").open("ab")
        self.ended = False

    @property
    def is_active(self) -> bool:
        return not self.ended and os.getpid() == self.pid

    def find(self, optimizer: Any) -> TrackedOptimizer | None:
        """Return the record of an optimizer, or of the one that it wraps."""
        inner = getattr(optimizer, "optimizer", None)
        return self.optimizers.get(id(optimizer)) or self.optimizers.get(id(inner))

    # ------------------------------------------------------------------
    # Gradients.

    def add_parameters(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        tracked = self.optimizers.get(id(optimizer))
        if tracked is None:
            tracked = self.optimizers[id(optimizer)] = TrackedOptimizer(
                len(self.optimizers), optimizer
            )
        for p in parameters:
            if type(p.data) is not Tensor:
                tracked.reason = f"parameters are {type(p.data).__name__}s"
                continue
            number = len(tracked.parameters)
            tracked.parameters.append(p)
            self.of_parameter.setdefault(id(p), []).append((tracked, number))
            self._hook(tracked, number)
        tracked.choose_positions()

    def _hook(self, tracked: TrackedOptimizer, number: int) -> None:
        p = tracked.parameters[number]
        if not p.requires_grad or not p.is_leaf or number in tracked.hooked:
            return
        tracked.hooked[number] = p.register_hook(
            functools.partial(self._on_gradient, tracked, number)
        ).id
        self._read_first(tracked, number)

    def _read_first(self, tracked: TrackedOptimizer, number: int) -> None:
        """Put the observer's hook before the script's: a micro-step's gradient is the
        loss's own, and a hook's change to it (a division, say) is a part of the update.
        """
        hooks: Any = tracked.parameters[number]._backward_hooks  # noqa: SLF001
        own = tracked.hooked[number]
        if hooks is not None and own in hooks and next(iter(hooks)) != own:
            # Autograd runs them in the order of insertion, whatever `move_to_end` says.
            entries = {own: hooks[own], **hooks}
            hooks.clear()
            hooks.update(entries)

    def _on_gradient(self, tracked: TrackedOptimizer, number: int, gradient: Tensor) -> None:
        if not self.is_active or not self.in_backward:
            return
        window = tracked.window
        if tracked.backward != self.backwards:  # a micro-step begins
            tracked.backward = self.backwards
            accumulated = tracked.parameters[number].grad
            weights = tracked.sample(tracked.parameters)
            moved = window.weights is not None and not np.array_equal(
                weights, window.weights, equal_nan=True
            )
            window.weights = weights
            window.micro_steps.append(
                {
                    "backward": self.backwards,
                    "lines": list(self.lines_of_backward),
                    "cleared": accumulated is None or not bool(accumulated.detach().any()),
                    "moved": moved,
                    "lr": [float(group["lr"]) for group in tracked.optimizer.param_groups],
                    "loss": self.loss,
                    "state": self.state,
                    "fetched": self.fetched,
                    "quiet": any(not ddp.require_backward_grad_sync for ddp in self.wrapped),
                    "other_updates": [
                        other.updates for other in self.optimizers.values() if other is not tracked
                    ],
                }
            )
            window.columns.append(np.zeros(tracked.values))
        if gradient.is_sparse or type(gradient) is not Tensor:
            _note(window.reasons, f"a gradient is a {type(gradient).__name__}, not dense")
            return
        tracked.put(window.columns[-1], number, gradient)

    def watch_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if not self.is_active or self.in_backward:
                return original(tensors, *args, **kwargs)
            self.recorder.stop()
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            self.backwards += 1
            self.depth = 0
            self.lines_of_backward = tuple(script_lines(inspect.currentframe(), exact=True))
            for tracked in self.optimizers.values():
                for number in tracked.hooked:
                    self._read_first(tracked, number)
            self.loss = read_loss(roots)
            self.state = self._digest_state()
            if self.recorder.operations or self.backwards > 1:
                self._probe(self.loss)
            self.recorder.clear()
            can_record = self._wants_probe() and not is_compiled(roots)
            self.in_backward = True
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self.in_backward = False
                if can_record:
                    self.recorder.start()

        return backward

    def _wants_probe(self) -> bool:
        """Return whether a line with a backward pass needs further replays."""
        return any(map(self._needs_probe, self.probes)) if self.probes else True

    def _needs_probe(self, lines: tuple[str, ...]) -> bool:
        probes = self.probes.get(lines, [])
        if any(probe.own_sum is not None for probe in probes):  # those of a window are compared
            return len(probes) < MOST_PROBES
        done = sum(probe.untested is None for probe in probes if probe.backward > 1)
        return done < PROBED_MICRO_STEPS and len(probes) < MOST_PROBES

    def _probe(self, loss: LossGraph) -> None:
        """Test by the recorded micro-step whether its samples influence one another."""
        lines = self.lines_of_backward
        if lines not in self.probes and len(self.probes) >= MOST_PROBED_LINES:
            return
        probes = self.probes.setdefault(lines, [])
        if not self._needs_probe(lines) or loss.node is None or loss.reason is not None:
            return
        probe = Probe(self.backwards)
        probes.append(probe)
        reductions = find_reductions(self.recorder, loss.nodes)
        if reductions is None:
            probe.untested = self.recorder.failure or "the loss's computation was not recorded"
            return
        try:
            self._replay(probe, reductions)
        except Exception as error:  # noqa: BLE001  the script must run on, and the report says it
            probe.untested = f"the replay failed: {type(error).__name__}: {error}"

    def _replay(self, probe: Probe, reductions: list[Operation]) -> None:
        state = {id(t) for m in self.modules.values() for t in (*m.parameters(), *m.buffers())}
        trained = [p for tracked in self.optimizers.values() for p in tracked.parameters]
        state |= {id(t) for p in trained for t in (p, p.grad) if t is not None}
        rows = [len(f["rows"]) for f in self.forwards if f["before"] == self.backwards]
        replay = Replay(self.recorder, reductions, state, max(rows, default=0) or None)
        for forward, tensors in self.outputs:  # also of those before earlier backward passes
            if not forward["data"]:
                forward["data"] = replay.is_data(tensors)
        probe.mixed, probe.untested = compare_samples(replay)
        if probe.untested == UNCHANGED and replay.usual_rows() != replay.rows:
            # The model sees several rows of each sample, as two views.
            replay = Replay(self.recorder, reductions, state, None)
            probe.mixed, probe.untested = compare_samples(replay)
        if probe.mixed is not None:
            probe.own_sum = own_sum(replay)
        probe.constants, probe.free = replay.constants(), sorted(replay.free)

    def _digest_state(self) -> dict[str, str]:
        """Return digests of frozen weights, buffers, and weights of other models."""
        digests: dict[str, str] = {}
        for number, module in enumerate(self.modules.values()):
            norms = {
                id(b) for m in module.modules() if isinstance(m, BATCH_NORMS) for b in m.buffers()
            }
            named = [(name, b) for name, b in module.named_buffers() if id(b) not in norms]
            for name, p in module.named_parameters():
                if not p.requires_grad or id(p) not in self.of_parameter:
                    named.append((name, p))
            for name, tensor in named:
                if type(tensor.data) is Tensor and tensor.is_floating_point():
                    values = tensor.detach().reshape(-1)
                    values = values[:: max(1, len(values) // MOST_STATE_VALUES)].double().cpu()
                    digest = hashlib.blake2b(values.numpy().tobytes(), digest_size=8)
                    digests[f"{type(module).__name__} {number}: {name}"] = digest.hexdigest()
        return digests

    # ------------------------------------------------------------------
    # Updates.

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        tracked = self.optimizers.get(id(optimizer))
        if tracked is None or not self.is_active:
            return None
        if tracked in self.stepping:  # whose step an exception has ended
            del self.stepping[self.stepping.index(tracked) :]
        own = set(map(id, tracked.parameters))
        # A sharded optimizer, as `ZeroRedundancyOptimizer`, is judged as a whole.
        tracked.is_part = any(own < set(map(id, outer.parameters)) for outer in self.stepping)
        self.stepping.append(tracked)
        if tracked.is_part:
            return None
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is None:
            self._sample_applied(tracked)
            return None
        tracked.closure_calls = 0

        def watched() -> Any:
            if tracked.closure_calls:  # each gradient that the optimizer asks for is judged
                self._end_window(tracked)
            self.recorder.clear()  # the optimizer's operations are no part of a micro-step
            result = closure()
            tracked.closure_calls += 1
            self._sample_applied(tracked)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _sample_applied(self, tracked: TrackedOptimizer) -> None:
        for number in range(len(tracked.parameters)):
            if number not in tracked.hooked and tracked.parameters[number].requires_grad:
                self._hook(tracked, number)
                _note(tracked.window.reasons, "a parameter was unfrozen in this window")
        if self.in_backward:
            _note(tracked.window.reasons, "the optimizer steps within backward")
        ids = {id(p) for group in tracked.optimizer.param_groups for p in group["params"]}
        if tracked.reason is None and not ids.issuperset(map(id, tracked.parameters)):
            tracked.reason = "the optimizer's parameters were replaced after it was made"
        if tracked.reason is not None:
            _note(tracked.window.reasons, tracked.reason)
        tracked.applied = tracked.sample(p.grad for p in tracked.parameters)
        if self.own_clip is not None:
            self.events += 1
            window = tracked.window
            window.before_clip, self.own_clip = tracked.applied / self.own_clip, None
            window.clips.append({"after": len(window.micro_steps), "event": self.events})
        scale = getattr(tracked.optimizer, "grad_scale", None)
        if scale is not None:  # an optimizer that removes the loss scaler's scale by itself
            tracked.window.scale = float(scale)
            tracked.applied /= tracked.window.scale

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        tracked = self.optimizers.get(id(optimizer))
        if tracked is None or not self.is_active:
            return
        if tracked in self.stepping:
            del self.stepping[self.stepping.index(tracked) :]
        if tracked.is_part:
            tracked.window = ObservedWindow()
            return
        self._end_window(tracked)
        stepped = [entry.updates for entry in self.optimizers.values() if entry.updates]
        wanted = self.updates or UPDATES_BY_DEFAULT
        if self.ends_process and (min(stepped) >= wanted or max(stepped) > wanted):
            self.finish("as many updates as were asked for")
            self._leave()

    def _end_window(self, tracked: TrackedOptimizer) -> None:
        """Write down an update, or one of several gradients that an update is made of."""
        window = tracked.window
        weights = tracked.sample(tracked.parameters)
        columns = [*window.columns, tracked.applied]
        if window.before_clip is not None:
            columns.append(window.before_clip)
        offset = self.data.tell()
        for column in columns:
            self.data.write(column.tobytes())
        self.data.flush()
        steps = [{**step, "loss": step["loss"].to_json()} for step in window.micro_steps]
        self._write(
            update=tracked.updates,
            optimizer=tracked.index,
            offset=offset,
            values=tracked.values,
            micro_steps=steps,
            clips=window.clips,
            clipped=window.before_clip is not None,
            schedules=window.schedules,
            scale=window.scale,
            reasons=window.reasons,
            weights_sha256=hashlib.sha256(weights.tobytes()).hexdigest(),
            at=self.backwards,
            forwards=window.forwards,
            collectives=window.collectives,
            horizons=sorted(tracked.horizons),
            wrapped=bool(self.wrapped),
            gradient_bytes=sum(p.numel() * p.element_size() for p in tracked.parameters),
            dtypes=sorted({str(p.dtype) for p in tracked.parameters}),
            grouped=dist.is_available() and dist.is_initialized(),
        )
        tracked.window = ObservedWindow()
        tracked.updates += 1
        self.forwards = []
        self.outputs.clear()
        self.recorder.clear()
        if self.updates is None:  # up to the end of the first epoch, if that is near
            self.updates = UPDATES_BY_DEFAULT
            if self.loaders and steps:
                epoch = -(-self.loaders[0]["length"] // len(steps))
                if epoch <= MOST_UPDATES:
                    self.updates = max(UPDATES_BY_DEFAULT, epoch + 1)

    def skip(self, tracked: TrackedOptimizer) -> None:
        """Forget a window whose update a loss scaler has skipped."""
        tracked.window = ObservedWindow()
        self._write(skipped=tracked.updates, optimizer=tracked.index)

    def unscaled(self, tracked: TrackedOptimizer, scale: float) -> None:
        tracked.window.scale, tracked.window.is_unscaled = scale, True
        if tracked.window.before_clip is not None:
            _note(tracked.window.reasons, CLIPPED_WHILE_SCALED)

    def clip(self, parameters: Any, *limit: Any, **named: Any) -> None:
        limits = (*limit, named.get("max_norm"), named.get("clip_value"))
        given_limit = next((value for value in limits if value is not None), None)
        # Without a limit it only computes the norm.
        if not self.is_active or given_limit is None or float(given_limit) == float("inf"):
            return
        clipped_parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for tracked in {s for p in clipped_parameters for s, _ in self.of_parameter.get(id(p), [])}:
            window, after = tracked.window, len(tracked.window.micro_steps)
            # Parts of a gradient may be clipped one by one: before the first it is whole.
            if not window.clips or window.clips[-1]["after"] != after:
                with self.recorder.paused():
                    window.before_clip = tracked.sample(p.grad for p in tracked.parameters)
            self.events += 1
            window.clips.append({"after": after, "event": self.events})

    def schedule(self, scheduler: Any, *_: Any, **__: Any) -> None:
        tracked = self.find(getattr(scheduler, "optimizer", None))
        if tracked is not None and self.is_active:
            tracked.window.schedules.append(len(tracked.window.micro_steps))
            tracked.horizons |= _horizons(scheduler)

    # ------------------------------------------------------------------
    # Forward passes, data, collectives.

    def before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not self.is_active or self.in_backward or _is_transformed():
            return
        self.depth += 1
        if self.depth > 1:
            return
        self.modules[id(module)] = module
        if not torch.is_grad_enabled() or not module.training:
            return
        if next(module.parameters(), None) is None:
            return
        if not inputs and id(module) not in self.given_by_name:
            # Global hooks do not see inputs that are given by name: from now on, one of its own.
            self.given_by_name.add(id(module))
            module.register_forward_pre_hook(
                lambda _, args, kwargs: self._note_rows(kwargs.values()) if not args else None,
                with_kwargs=True,
            )
        with self.recorder.paused():
            state = torch.get_rng_state().numpy().tobytes()
        random = hashlib.sha256(state).hexdigest()[:16]
        self.forward_count += 1
        forward: dict[str, Any] = {
            "number": self.forward_count,
            "before": self.backwards + 1,
            "rows": [],
            "random": random,
            "used": False,
            "data": None,
            "lines": script_lines(inspect.currentframe()),
        }
        for forwards in (self.forwards, *(t.window.forwards for t in self.optimizers.values())):
            forwards.append(forward)
        self._note_rows(inputs)

    def _note_rows(self, inputs: Iterable[Any]) -> None:
        if not self.is_active or self.in_backward or not self.forwards or self.forwards[-1]["rows"]:
            return
        # The largest has the samples; others may be positions, masks or times, alike on all ranks.
        tensor = max(filter(_has_rows, _tensors(inputs)), key=Tensor.numel, default=None)
        if tensor is None:
            return
        with self.recorder.paused():
            rows = tensor.detach()[:4096].cpu().contiguous()
            as_bytes = rows.reshape(len(rows), -1).view(torch.uint8).numpy()
            self.forwards[-1]["rows"] = [
                hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in as_bytes
            ]

    def after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del inputs
        if not self.is_active or self.in_backward or _is_transformed():
            return
        self.depth = max(0, self.depth - 1)
        if not torch.is_grad_enabled() or not module.training:
            return
        if isinstance(module, BATCH_NORMS):
            self.layers["norms"].add(type(module).__name__)
        if isinstance(module, DROPOUTS) and module.p > 0:
            self.layers["dropouts"] += 1
        tensors = [t for t in _tensors([output]) if t.requires_grad]
        if self.depth == 0 and self.forwards and next(module.parameters(), None) is not None:
            forward = self.forwards[-1]
            if not tensors:  # as without gradients, it is for something else
                forward["frozen"] = True
            if self.recorder.records:
                with self.recorder.paused():
                    self.outputs.append((forward, [tensor.detach() for tensor in tensors]))
            for tensor in tensors:
                if not tensor.is_leaf:
                    tensor.register_hook(lambda _, forward=forward: self._use(forward))

    def _use(self, forward: dict[str, Any]) -> None:
        forward["used"] = True

    def collective(self, kind: str, tensor: Any) -> None:
        if self.in_hook or not self.is_active:
            return
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            self.events += 1
            event = {
                "kind": kind,
                "bytes": tensor.numel() * tensor.element_size(),
                "backward": self.backwards,
                "event": self.events,
            }
            for tracked in self.optimizers.values():
                tracked.window.collectives.append(event)

    # ------------------------------------------------------------------
    # The end.

    def _write(self, **record: Any) -> None:
        self.lines.write(json.dumps(record) + "\n")
        self.lines.flush()

    def finish(self, why: str, *, refused: bool = False) -> None:
        """Write down the end, once. `refused`: the script cannot be observed, as `why` says."""
        if self.ended or os.getpid() != self.pid:
            return
        self.ended = True
        self.recorder.stop()
        self._write(
            end=why,
            refused=refused,
            backwards=self.backwards,
            loaders=self.loaders,
            probes=[probe.to_json() for probes in self.probes.values() for probe in probes],
            processes=self.processes,
            layers={**self.layers, "norms": sorted(self.layers["norms"])},
            environment={
                "torch": torch.__version__,
                "python": sys.version.split()[0],
                "threads": torch.get_num_threads(),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
            },
        )
        (self.folder / f"done-{self.rank:05d}").touch()

    def _leave(self) -> None:
        """End this process, once the others are done or have had time to be: they may need it in a
        collective.
        """
        until = time.monotonic() + 20.0
        size = int(os.environ.get("WORLD_SIZE", "1"))
        while len(list(self.folder.glob("done-*"))) < size and time.monotonic() < until:
            time.sleep(0.02)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _note(reasons: list[str], reason: str) -> None:
    if reason not in reasons:
        reasons.append(reason)


def _horizons(scheduler: Any) -> set[str]:
    """Return the lengths that a schedule was given, and whether it is a function of the user's."""
    horizons = {
        f"{name}={getattr(scheduler, name)}"
        for name in HORIZONS
        if isinstance(getattr(scheduler, name, None), int)
    }
    if milestones := getattr(scheduler, "milestones", None):
        horizons.add(f"milestones={sorted(milestones)}")
    if hasattr(scheduler, "lr_lambdas") or hasattr(scheduler, "lr_lambda"):
        horizons.add("its function")
    return horizons


def _is_transformed() -> bool:
    """Return whether torch.func is at work, whose tensors have no values to be read."""
    functorch = importlib.import_module("torch._C._functorch")  # not importable by a statement
    return functorch.peek_interpreter_stack() is not None


def _has_rows(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and not tensor.is_nested
    return dense and not tensor.requires_grad and tensor.dim() >= 1 and tensor.numel() > 0


def _tensors(values: Iterable[Any], levels: int = 2) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif levels and isinstance(value, dict):
            yield from _tensors(value.values(), levels - 1)
        elif levels and isinstance(value, list | tuple):
            yield from _tensors(value, levels - 1)


# ----------------------------------------------------------------------
# Hooks into torch.


def install(observer: Observer) -> None:
    """Register the observer with torch: hooks where torch has them, wrapped functions elsewhere."""
    torch.autograd.backward = observer.watch_backward(torch.autograd.backward)
    nn.modules.module.register_module_forward_pre_hook(observer.before_forward)
    nn.modules.module.register_module_forward_hook(observer.after_forward)
    register_optimizer_step_pre_hook(observer.before_step)
    register_optimizer_step_post_hook(observer.after_step)
    add_param_group = Optimizer.add_param_group

    def adding(self: Optimizer, param_group: dict[str, Any]) -> None:
        add_param_group(self, param_group)
        if observer.is_active:
            observer.add_parameters(self, self.param_groups[-1]["params"])
            if not observer.backwards:
                observer.recorder.start()  # the first micro-step may be the only one

    Optimizer.add_param_group = adding
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrapped = _before(getattr(nn.utils, name), observer.clip)
        for module in (nn.utils, nn.utils.clip_grad):
            setattr(module, name, wrapped)
    for scheduler in vars(lr_scheduler).values():
        if isinstance(scheduler, type) and "step" in vars(scheduler):
            scheduler.step = _before(scheduler.step, observer.schedule)
    _install_scaler(observer)
    _install_loader(observer)
    _install_policy(observer)
    if dist.is_available():
        _install_collectives(observer)


def _before(function: Callable[..., Any], call: Callable[..., None]) -> Callable[..., Any]:
    """Wrap `function`: `call` gets its arguments before it runs."""

    @functools.wraps(function)
    def wrapped(first: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(first, "__next__"):
            first = list(first)  # an iterator of parameters serves once
        call(first, *args, **kwargs)
        return function(first, *args, **kwargs)

    return wrapped


def _counted(method: Callable[..., Any], name: str, observer: Observer) -> Callable[..., Any]:
    """Wrap a collective of a process group, so that the observer counts it."""

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer.collective(name, next(_tensors(args), None))
        return method(self, *args, **kwargs)

    return wrapped


def _install_scaler(observer: Observer) -> None:
    scaler = torch.amp.GradScaler
    step, unscale, update = scaler.step, scaler.unscale_, scaler.update

    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: Any) -> Any:
        tracked = observer.find(optimizer)
        if tracked is not None and self.is_enabled():
            observer.unscaled(tracked, float(self.get_scale()))
        return unscale(self, optimizer)

    @functools.wraps(step)
    def stepping(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        tracked = observer.find(optimizer)
        done = tracked.updates if tracked else 0
        result = step(self, optimizer, *args, **kwargs)
        if tracked is not None and observer.is_active and tracked.updates == done:
            observer.skip(tracked)
        return result

    @functools.wraps(update)
    def updating(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The scaler forgets what it unscaled, so a window whose step the script leaves out ends.
        for tracked in observer.optimizers.values() if observer.is_active else ():
            if tracked.window.is_unscaled:
                observer.skip(tracked)
        return update(self, *args, **kwargs)

    scaler.step, scaler.unscale_, scaler.update = stepping, unscale_, updating


def _install_policy(observer: Observer) -> None:
    """Note how the project's own accumulator clips: with one factor, as it averages."""
    from orchestrator.engine.common.update_policy import EPSILON, UpdatePolicy

    norm_and_factor = UpdatePolicy.norm_and_factor

    @functools.wraps(norm_and_factor)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        decision = norm_and_factor(self, *args, **kwargs)
        limit = self._clip_norm
        if decision is not None and limit is not None:
            observer.own_clip = min(1.0, limit / (decision[0] + EPSILON))
        return decision

    UpdatePolicy.norm_and_factor = noting


def _install_loader(observer: Observer) -> None:
    """Note how many micro-batches a training loader has, and whether its end was reached."""
    loader = torch.utils.data.DataLoader
    iterate = loader.__iter__

    @functools.wraps(iterate)
    def iterating(self: Any) -> Any:
        iterator = iterate(self)
        if not observer.is_active:
            return iterator
        observer.fetched += 1
        with contextlib.suppress(TypeError):
            observer.loaders.append(
                {"loader": id(self), "length": len(self), "from": observer.backwards}
            )
        return iterator

    loader.__iter__ = iterating
    # An iterator of a loader has no public class.
    base: Any = vars(importlib.import_module("torch.utils.data.dataloader"))["_BaseDataLoaderIter"]
    fetch = base.__next__

    @functools.wraps(fetch)
    def fetching(self: Any) -> Any:
        observer.fetched += 1
        return fetch(self)

    base.__next__ = fetching


def _install_collectives(observer: Observer) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel as Ddp

    for group in (dist.ProcessGroup, getattr(dist, "ProcessGroupGloo", None)):
        for name in COLLECTIVES if group is not None else ():
            setattr(group, name, _counted(getattr(group, name), name, observer))
    build, register, forward = Ddp.__init__, Ddp.register_comm_hook, Ddp.forward

    @functools.wraps(build)
    def building(self: Ddp, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        observer.wrapped.append(self)

    def registering(self: Ddp, *args: Any, **kwargs: Any) -> None:
        self._audited = True  # type: ignore[assignment]
        register(self, *args, **kwargs)

    def reduce(group: Any, bucket: Any) -> Any:
        observer.collective("ddp", bucket.buffer())
        observer.in_hook = True  # the hook calls all_reduce itself
        try:
            return allreduce_hook(group, bucket)
        finally:
            observer.in_hook = False

    reduce.__annotations__.clear()  # DDP does not read those that are text

    @functools.wraps(forward)
    def forwarding(self: Ddp, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "_audited"):
            self._audited = True  # type: ignore[assignment]
            register(self, self.process_group, reduce)
        return forward(self, *args, **kwargs)

    Ddp.__init__, Ddp.register_comm_hook, Ddp.forward = building, registering, forwarding


# ----------------------------------------------------------------------


def start(rank: int) -> Observer:
    """Observe this process, by the variables that `orchestrator audit` sets."""
    if os.environ.get(FAKE_CUDA):
        from orchestrator.audit.fake_cuda import simulate

        simulate()
    updates = os.environ.get(UPDATES)
    CopyOnWrite(Path(os.environ[FOLDER]).with_name(FILES)).install()
    observer = Observer(Path(os.environ[FOLDER]), int(updates) if updates else None, rank)
    install(observer)
    return observer


@contextlib.contextmanager
def observe_job(rank: int) -> Generator[None]:
    """Observe the training below, in a rank of a job class."""
    observer = start(rank)
    observer.ends_process = False
    why = "the job failed"
    try:
        yield
        why = "the job ended"
    finally:
        observer.finish(why)


class OwnRanksRefused(SystemExit):
    """The end of a script that starts its ranks in a way that cannot be observed."""

    def __init__(self, way_out: str) -> None:
        super().__init__(f"the script starts its ranks by itself{way_out}")


def _replace_own_ranks(observer: Observer) -> None:
    """Let this process be one of the ranks that the script would start, and count the others."""
    mp: Any = importlib.import_module("torch.multiprocessing")
    work = importlib.import_module("torch.utils.data._utils.worker")
    loaders_worker = vars(work)["_worker_loop"]
    ranks, local = (int(os.environ.get(n, "1")) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))

    def refuse(*_: Any, **__: Any) -> None:
        raise OwnRanksRefused(
            ": let audit start them (they have torchrun's variables), as in "
            "audit cluster.ranks_per_node=2 -- train.py"
        )

    def spawn(
        fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True, **_: Any
    ) -> None:
        if not join or ranks != local:
            refuse()
        if nprocs != ranks:
            raise OwnRanksRefused(
                f", {nprocs} of them, and the audit {ranks}: "
                f"audit cluster.ranks_per_node={max(nprocs, 1)} -- train.py"
                + ("" if os.environ.get(FAKE_CUDA) else " (--fake-cuda shows as many GPUs)")
            )
        fn(int(os.environ.get("LOCAL_RANK", "0")), *args)

    mp.start_processes = refuse
    mp.spawn = spawn
    start = BaseProcess.start

    @functools.wraps(start)
    def starting(self: Any) -> None:
        if observer.is_active and getattr(self, "_target", None) is not loaders_worker:
            observer.processes += 1
        start(self)

    BaseProcess.start = starting


def main(argv: list[str]) -> None:
    """Run a script (or, after -m, a module) as `python` would, observed."""
    observer = start(int(os.environ.get("RANK", "0")))
    _replace_own_ranks(observer)
    why, refused = "the script returned", False
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        if isinstance(error, OwnRanksRefused):
            why, refused = str(error.code), True
            raise SystemExit(0) from None
        if error.code not in (None, 0):
            why = f"the script exited with {error.code}"
        raise
    except BaseException as error:
        why = f"the script failed: {type(error).__name__}: {error}"
        raise
    finally:
        observer.finish(why, refused=refused)
