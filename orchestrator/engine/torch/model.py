"""Models, batches and optimizers: seeds, devices, precision, batch norm, learning rates."""

from __future__ import annotations

import copy
import os
from collections import UserDict
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Embedding, EmbeddingBag, Module, functional
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]  # the common base
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from orchestrator.data import kept_generators
from orchestrator.engine.common.job_checks import (
    name_layers,
    norm_advice,
    norm_groups,
    optimizer_class,
    replaced_norms,
    uncompiled,
)
from orchestrator.engine.common.job_state import MOST_ENTRIES, JobState
from orchestrator.engine.common.learning_rate import LearningRate
from orchestrator.engine.common.modes import ModelModes
from orchestrator.engine.common.seeds import seed_python_and_numpy
from orchestrator.engine.common.update_policy import LossScale
from orchestrator.engine.torch.buffers import is_dense, is_expanded, local_part
from orchestrator.engine.torch.group import bytes_of, version_of
from orchestrator.errors import ConfigError, JobError, did_you_mean


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators, from 64 bits."""
    seed_python_and_numpy(seed)
    seed_torch(seed)


def seed_torch(seed: int) -> None:
    """Seed torch's generators of the CPU and of all devices of the accelerator in use: a loop of
    one's own may compute on another one than the current.

    `torch.manual_seed` seeds every device of every kind that torch knows of, and takes longer: for
    an unused kind it keeps the stack as text for a message, which reads the size and date of every
    source file on it: some 30 file operations a call, several hundred a second in training.
    """
    torch.default_generator.manual_seed(seed)
    # A loader's worker computes on no device, and would wake one up only to seed it.
    if get_worker_info() is None and (seed_devices := _seed_devices()) is not None:
        seed_devices(seed)


@cache
def _seed_devices() -> Callable[[int], Any] | None:
    """Return what seeds the devices of the accelerator in use; None where there is none."""
    if not torch.accelerator.is_available():
        return None
    # Of one that has none (Apple's), torch's own way is the one that is known.
    return getattr(torch.get_device_module(), "manual_seed_all", torch.manual_seed)


@contextmanager
def kept_random_state() -> Generator[None]:
    """Give Python's, NumPy's and torch's global generators, those of devices too, their states
    back.
    """
    device: Any = torch.get_device_module()  # of the CPU, which has one only, where there is none
    states = None
    if hasattr(device, "get_rng_state_all") and device.is_initialized():
        states = device.get_rng_state_all()
    try:
        with kept_generators():
            yield
    finally:
        if states is not None:
            device.set_rng_state_all(states)


# ------------------------------------------------------------------ Devices and dtypes


def double_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of 64 bits a number that goes with `dtype`; integers stay what they are.

    >>> double_of(torch.float32), double_of(torch.complex64), double_of(torch.int32)
    (torch.float64, torch.complex128, torch.int32)
    """
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def doubled(model: Module) -> Module:
    """`model` with all its floating and complex tensors in double precision, in place.

    `Module.double` leaves complex ones alone.
    """
    return model._apply(lambda tensor: tensor.to(double_of(tensor.dtype)))  # noqa: SLF001  # no public name  # pyright: ignore[reportPrivateUsage]


def moved(batch: Any, device: torch.device, *, double: bool = False) -> Any:
    """`batch` on `device`, in double precision when asked; containers keep their type."""
    if isinstance(batch, Tensor):
        dtype = double_of(batch.dtype) if double else batch.dtype
        # Without waiting: kernels that read it queue up behind the copy.
        return batch.to(device, dtype, non_blocking=True)
    if isinstance(batch, Mapping):
        entries: Mapping[Any, Any] = batch
        moved_entries = {key: moved(value, device, double=double) for key, value in entries.items()}
        if type(batch) is dict or not isinstance(batch, (dict, UserDict)):
            return moved_entries
        same: Any = copy.copy(entries)  # a tokenizer's batch has attributes as well
        same.update(moved_entries)
        return same
    if isinstance(batch, PackedSequence):  # whose sizes of batches stay on the CPU
        names = ("data", "sorted_indices", "unsorted_indices")
        parts = {name: moved(getattr(batch, name), device, double=double) for name in names}
        return batch._replace(**parts)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(moved(value, device, double=double) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(moved(value, device, double=double) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch


def be_deterministic() -> None:
    """Have torch use kernels that give the same bits each time, and refuse those that cannot."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(mode=True)
    # It fills new tensors with NaN to find other bugs; that costs time and changes no result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a module that acts as an object
    torch.backends.cudnn.benchmark = False
    # Flash attention and the plain one have deterministic backwards; these two have not.
    torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)


@contextmanager
def in_evaluation(model: Module) -> Generator[None]:
    """Put a model into evaluation mode; each of its layers is as before afterwards."""
    modes = {layer: layer.training for layer in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for layer, training in modes.items():
            layer.training = training


class ForwardState:
    """Copy of what a model's forward may change: its buffers and, if asked for, extra state.

    A vector is always copied, since torch counts no version where batch norm writes its statistics.
    Which tensor a buffer is counts too, since a forward may put another one in its place.
    """

    def __init__(self, model: Module, *, extra: bool) -> None:
        self._model, self._with_extra = model, extra
        self._buffers: dict[tuple[str, str], tuple[Module, Tensor, int, Tensor]] = {}
        self.keep()

    def keep(self) -> None:
        """Keep the present values in place of those kept before."""
        earlier, self._buffers = self._buffers, {}
        for path, layer in self._model.named_modules():
            for name, buffer in layer.named_buffers(recurse=False):
                if is_opaque(buffer):
                    continue
                _, same, version, before = earlier.get((path, name), (layer, None, 0, buffer))
                if is_expanded(buffer):  # one number in many places: nothing writes to it
                    before = buffer
                elif same is not buffer:
                    before = buffer.detach().clone()
                elif buffer.dim() <= 1 or version != version_of(buffer):
                    before.copy_(buffer.detach())  # takes no new memory in each window
                self._buffers[path, name] = layer, buffer, version_of(buffer), before
        self._extra = [
            (layer, copy.deepcopy(layer.get_extra_state()))
            for layer in (self._model.modules() if self._with_extra else ())
            # Those of `Module` itself raise.
            if type(layer).get_extra_state is not Module.get_extra_state
            and type(layer).set_extra_state is not Module.set_extra_state
        ]

    def changed_layers(self) -> list[str]:
        """Return the layers, but for batch norms, whose saved buffers hold other values now."""

        def has_changed(layer: Module, name: str, before: Tensor) -> bool:
            saved = name not in layer._non_persistent_buffers_set  # noqa: SLF001  # no public name  # pyright: ignore[reportPrivateUsage]
            if not saved or isinstance(layer, _BatchNorm) or before.layout is not torch.strided:
                return False
            now: Tensor | None = getattr(layer, name, None)
            if now is None or is_opaque(now):
                return now is None
            alike = now.device == before.device and now.dtype == before.dtype
            # By bytes, where NaN is equal to itself.
            return alike and not torch.equal(bytes_of(now), bytes_of(before))

        changed = (
            path
            for (path, name), (layer, _, _, before) in self._buffers.items()
            if has_changed(layer, name, before)
        )
        return list(dict.fromkeys(changed))

    def restore(self) -> None:
        """Give the model back what it had."""
        for (_, name), (layer, buffer, _, before) in self._buffers.items():
            if before is not buffer:
                buffer.detach().copy_(before)
            setattr(layer, name, buffer)
        for layer, before in self._extra:
            layer.set_extra_state(copy.deepcopy(before))  # the layer may change what it gets


def frozen_modules(modules: Iterable[tuple[str, Module]]) -> set[str]:
    """Return the names of the modules in evaluation mode."""
    return {name for name, module in modules if not module.training}


def modes_of(model: Module) -> ModelModes:
    """Return which parameters of `model` train, and which of its modules are in training mode."""
    # A compiled model and the one within have the same names, so a checkpoint fits either.
    modules = [(uncompiled(f"{name}.")[:-1], layer) for name, layer in model.named_modules()]
    parameters = [(uncompiled(name), p) for name, p in model.named_parameters()]
    return ModelModes({"requires_grad": parameters, "training": modules})


def job_state_of(job: Any, model: Module, optimizer: Optimizer) -> JobState:
    """Return the state that a job of torch keeps on itself, besides its model and optimizer."""
    in_checkpoints = {id(part) for part in (optimizer, *model.modules(), *model.parameters())}
    in_checkpoints |= set(map(id, model.buffers()))
    tensors_of: dict[int, tuple[Module, list[Tensor]]] = {}

    def version(value: Any) -> Any:
        if id(value) in in_checkpoints:
            return 0
        if isinstance(value, Tensor):
            if value.is_cpu and value.numel() <= MOST_ENTRIES and value.layout is torch.strided:
                return bytes_of(value).tolist()
            return id(value), 0 if value.is_inference() else version_of(value)
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
        if isinstance(value, Module):
            # To walk through a large model takes longer than the rest of an update's checks.
            if id(value) not in tensors_of:
                tensors_of[id(value)] = value, [*value.parameters(), *value.buffers()]
            return list(map(version_of, tensors_of[id(value)][1]))
        return None

    return JobState(job, Module, version)


def is_opaque(buffer: Tensor) -> bool:
    """Return whether a buffer has no numbers that could be copied."""
    return buffer.is_meta or buffer.is_quantized or buffer.is_nested or is_lazy(buffer)


@contextmanager
def kept_state(model: Module) -> Generator[None]:
    """Give the model back the buffers and extra state that a loss may change."""
    state = ForwardState(model, extra=True)
    try:
        yield
    finally:
        state.restore()


# ------------------------------------------------------------------ Precision


class Precision(LossScale):
    """Number formats of a run. See `EngineSettings.precision` for the names.

    Raises:
        ConfigError: there is no precision of this name.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        known = ("float32", "bfloat16", "float16", "float64")
        if name not in known:
            raise ConfigError(f"there is no train.precision={name}{did_you_mean(name, known)}")
        super().__init__(scales=name == "float16")
        self.name, self._device = name, device
        self._dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)

    def forward(self) -> AbstractContextManager[Any]:
        """Within it, forward computations run in the format."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._dtype)


# ------------------------------------------------------------------ Batch norm (`engine.norm`)
# The output of a batch norm depends on which samples share its micro-batch, so no split but the
# trivial one gives the update of one big batch. With the other choices the output of a sample
# depends on that sample alone.


class FrozenBatchNorm(Module):
    """A batch norm that keeps its statistics, in training too. Weight and bias are still trained.

    Its state has the names of a batch norm's, so the state of either loads into the other.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, layer: _BatchNorm) -> None:
        super().__init__()
        self.eps = layer.eps
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("running_mean", layer.running_mean)
        self.register_buffer("running_var", layer.running_var)
        self.register_buffer("num_batches_tracked", layer.num_batches_tracked)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize a tensor (samples, channels, *)."""
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


def batch_norms_of(model: Any) -> dict[str, _BatchNorm]:
    """Return the batch norms in `model` by name, "" if it is one itself; of plain parameters
    none.
    """
    layers = model.named_modules() if isinstance(model, Module) else ()
    return {name: layer for name, layer in layers if isinstance(layer, _BatchNorm)}


def with_norms(model: Module, choice: str) -> tuple[Module, list[str]]:
    """Return the model with its batch norms frozen, replaced or left, and a note about it.

    Args:
        model: is changed in place, unless it is a batch norm itself.
        choice: "warn", which leaves it to `advice` to warn; "frozen", "group" or "layer".

    Raises:
        ConfigError: there is no such choice.
        JobError: a layer that cannot be frozen or replaced.
    """
    known = ("warn", "frozen", "group", "layer")
    if choice not in known:
        raise ConfigError(f"there is no engine.norm={choice}{did_you_mean(choice, known)}")
    norms = batch_norms_of(model)
    if choice == "warn" or not norms:
        return model, []
    replacements: dict[int, Module] = {}
    for name, layer in norms.items():
        where, channels = name or "the model itself", layer.num_features
        if choice == "frozen":
            if layer.running_mean is None:
                raise JobError(
                    f"engine.norm=frozen: {where} keeps no running statistics to freeze; use "
                    "engine.norm=group, or track_running_stats=True"
                )
            replacements[id(layer)] = FrozenBatchNorm(layer)
            continue
        if channels < 1:  # lazy ones do not know yet
            raise JobError(
                f"engine.norm={choice}: {where} does not know its number of channels before the "
                "first batch; state it in model()"
            )
        groups = norm_groups(choice, channels, vectors=isinstance(layer, nn.BatchNorm1d))
        grouped = nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)
        if layer.affine:
            # The layer's own parameters, with the values that the job gave them.
            grouped.weight, grouped.bias = layer.weight, layer.bias
        replacements[id(layer)] = grouped
    for parent in list(model.modules()):
        for child, layer in list(parent._modules.items()):  # noqa: SLF001  # named_children leaves shared ones out  # pyright: ignore[reportPrivateUsage]
            if id(layer) in replacements:
                setattr(parent, child, replacements[id(layer)])
    return replacements.get(id(model), model), [replaced_norms(choice, norms)]


# ------------------------------------------------------------------ Warnings


def sparse_embeddings(model: Module) -> list[str]:
    """Return the trained embeddings of `model` whose gradients are sparse, by name."""
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (Embedding, EmbeddingBag))
        and layer.sparse
        and layer.weight.requires_grad
    ]


def advice(model: Module, *, ranks: int, micro_batches: int | None) -> list[str]:
    """Return sentences about layers that do not do what one big batch would, or do it slowly.

    Args:
        ranks: how many train it.
        micro_batches: of an update, over all ranks; None for many.
    """
    advices: list[str] = []
    norms = {
        name: layer.running_mean is not None
        for name, layer in batch_norms_of(model).items()
        if layer.training or layer.running_mean is None
    }
    if norms and micro_batches != 1:
        advices.append(norm_advice(norms, apart=any(norms.values()) and ranks > 1))
    if sparse := sparse_embeddings(model):
        advices.append(
            f"sparse gradients of {name_layers(sparse)} are accumulated as dense ones; "
            "sparse=False says so and is faster"
        )
    return advices


def compile_contexts(model: Module) -> list[Any]:
    """Return torch's contexts of what is compiled in a model, by `torch.compile()` or `compile()`;
    None for one that this version of torch hides. Neither is public.
    """
    contexts: list[Any] = []
    for layer in model.modules():
        call = getattr(layer, "_compiled_call_impl", None)
        context = getattr(layer, "dynamo_ctx", None)
        if call is not None and call == getattr(layer, "_call_impl", None):  # disable=True
            call = None
        if call is not None:  # compiled in place: the function that is called holds its context
            cells = [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
            context = next((value for value in cells if hasattr(value, "_dynamic")), None)
        if call is not None or context is not None:
            contexts.append(context)
    return contexts


def compiled_advice(model: Module) -> list[str]:
    """Return a sentence for reproducible mode about a compiled model, unless by `dynamic=False`.

    After a second size of inputs torch compiles code for all sizes, and may use it for both.
    """
    if all(getattr(context, "_dynamic", None) is False for context in compile_contexts(model)):
        return []
    sentence = (
        "the model is compiled, so with leaves of two sizes their bits may depend on which size a "
        "process met first: use torch.compile(..., dynamic=False) and accumulation.ragged=drop, or "
        "leave it out"
    )
    return [sentence]


# ------------------------------------------------------------------ Optimizers


BY_NAME: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def build_optimizer(model: Module, settings: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer that the configuration's `optimizer` describes, over trained parameters.

    Args:
        model: whose parameters are trained where they require gradients.
        settings: `{"name": "sgd" | "adam" | "adamw", ...}` or `{"_target_": "dotted.name", ...}`;
            the other keys are the constructor's. Without the learning rate, which is the
            schedule's. By name, Adam is fused where torch can, unless `foreach`, `fused`,
            `capturable` or `differentiable` is given.

    Raises:
        ConfigError: an unknown class or key, or values that are refused.
    """
    spelled, make, arguments = optimizer_class(settings, BY_NAME)
    parameters = [p for p in model.parameters() if p.requires_grad]
    # Fused is one kernel for the whole step, several times as fast as torch's default; it reads
    # memory as it lies. That of SGD gains little, and fails where a parameter is first used late.
    can_fuse = settings.get("name") != "sgd" and all(
        p.is_floating_point() and is_dense(local_part(p)) and p.device.type in ("cpu", "cuda")
        for p in parameters
    )
    by_hand = arguments.keys() & {"foreach", "fused", "capturable", "differentiable"}
    if "_target_" not in settings and not by_hand and can_fuse:
        arguments["fused"] = True
    try:
        built = make(parameters, lr=1.0, **arguments)  # each window sets the schedule's rate
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{spelled} with {arguments} cannot be built: {error}") from error
    return check_optimizer(built, spelled)


def check_optimizer(optimizer: Any, spelled: str) -> Optimizer:
    """Return `optimizer`, or raise `ConfigError` if it cannot step on accumulated gradients."""
    values: Any = optimizer.values() if isinstance(optimizer, Mapping) else ()
    values = optimizer if isinstance(optimizer, (list, tuple)) else values
    if several := sum(isinstance(value, Optimizer) for value in values):
        raise ConfigError(
            f"{spelled} gives {several} optimizers, and an accumulator has one, which steps "
            "at its boundary. Where there are several, each with its loss (generator and "
            "discriminator, say), write a loop of your own with an accumulator for each: "
            "docs/how-to/library.md, 'Use several optimizers'"
        )
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{spelled} gives a {type(optimizer).__name__}, not a torch Optimizer")
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ConfigError(
            f"{spelled} gives a ZeroRedundancyOptimizer, whose step communicates by itself: give "
            "the optimizer within, and engine.shard_optimizer=true (in a script "
            "shard_optimizer=True) shards it"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(f"{spelled} needs a closure, which accumulated gradients do not have")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(f"{spelled} takes sparse gradients only; here they are dense: use adam")
    return optimizer


def learning_rate_of(optimizer: Optimizer) -> LearningRate:
    """Return an optimizer's learning rate, to be set."""
    base = float(optimizer.defaults.get("lr") or 0.0)
    # Read at each use: loading a state replaces the list.
    return LearningRate(
        type(optimizer).__name__, lambda: optimizer.param_groups, base, Tensor.fill_
    )
