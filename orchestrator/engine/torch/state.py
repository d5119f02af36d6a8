"""Model and optimizer to files and back, to the bit: safetensors for tensors, plain JSON for the
rest.

Nothing is pickled. Tensors that share their memory are written once; the file's metadata names the
others.
"""

from __future__ import annotations

import hashlib
import json
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.engine.common.job_checks import check_fits
from orchestrator.engine.torch.buffers import shard_like
from orchestrator.errors import JobError, RunFolderError

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
BESIDE = "beside"  # metadata entry: aliases and complex tensors


def save_model(
    model: Module, folder: Path, whole: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Write the state of `model`; give what of it JSON holds (modules' extra state).

    Args:
        whole: tensors in the place of those that are sharded.
    """
    tensors, rest = model_state(model)
    tensors |= whole or {}
    write_prepared(folder / WEIGHTS, *prepared(tensors))
    return rest


def load_model(model: Module, folder: Path, rest: Mapping[str, Any]) -> None:
    """Load what `save_model` wrote, or this rank's parts of it. Raises `RunFolderError` when it is
    another model's state.
    """
    state = _saved_model(folder, rest)
    held, _ = model_state(model)
    state |= {n: shard_like(state[n], tensor) for n, tensor in held.items() if n in state}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise RunFolderError(f"{folder / WEIGHTS} is of another model: {error}") from error


def _saved_model(folder: Path, rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `state_dict()` that `save_model` wrote."""
    tensors = _read(folder / WEIGHTS)
    # Tensors within extra state were written under names that begin with its own.
    within = {name for name in tensors for key in rest if name.startswith(f"{key}.")}
    state: dict[str, Any] = {n: tensor for n, tensor in tensors.items() if n not in within}
    return state | {name: unpack(value, tensors) for name, value in rest.items()}


def export_state(folder: Path, extra: Mapping[str, Any], form: str, to: Path) -> None:
    """Write a checkpoint for other programs; see `Framework.export`.

    "torch" is a file for `torch.load(weights_only=True)`, "dcp" a folder for
    `torch.distributed.checkpoint.load`: `model`, and `optimizer` or the states of `run.windows`.
    """
    model = _saved_model(folder, extra["model"])
    if form == "safetensors":  # others know no names for shared memory: each name has its own
        save_file({n: t.clone() for n, t in model.items() if isinstance(t, Tensor)}, to)
        return
    parts = unpack(extra["optimizer"], _read(folder / OPTIMIZER))
    state = {"model": model, **(parts if "windows" in extra else {"optimizer": parts})}
    if form == "torch":
        torch.save(state, to)
        return
    from torch.distributed.checkpoint.state_dict_saver import save  # takes a second to import

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as was asked for
        save(state, checkpoint_id=to, no_dist=True)


def load_weights(model: Module, path: Path) -> None:
    """Set the tensors of `model` to those of a file; extra state that is none stays as it is.

    Raises:
        ConfigError: names, shapes or dtypes are not the model's.
    """
    found = _read(path)
    held, rest = model_state(model)
    found = {
        name: tensor
        for name, tensor in found.items()
        if name in held or not any(name.startswith(f"{key}.") for key in rest)
    }
    check_fits(path, _kinds(found), _kinds(held))
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(shard_like(found[name], tensor))


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}


def save_optimizer(state: Mapping[str, Any], folder: Path) -> Any:
    """Write the tensors of an optimizer's `state_dict()`; give the rest as what JSON can hold."""
    tensors: dict[str, Tensor] = {}
    packed = pack(state, tensors, "")
    write_prepared(folder / OPTIMIZER, *prepared(tensors))
    return packed


def load_optimizer(folder: Path, packed: Any, restore: Callable[[dict[str, Any]], None]) -> None:
    """Read what `save_optimizer` wrote, and have `restore` take it.

    Raises:
        RunFolderError: it is another optimizer's state.
    """
    saved = unpack(packed, _read(folder / OPTIMIZER))
    try:
        restore(saved)
    except (ValueError, KeyError) as error:
        raise RunFolderError(f"{folder / OPTIMIZER} is of another optimizer: {error}") from error


MASTER = "master"
"""Name, in a saved state, of the float32 weights that a sharded optimizer steps in the place of
float16 or bfloat16 parameters."""


def restore_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """`load_state_dict`, but to the bit, and without the masters of a sharded optimizer."""
    states = {n: {k: v for k, v in s.items() if k != MASTER} for n, s in saved["state"].items()}
    saved = {**saved, "state": states}
    optimizer.load_state_dict(saved)
    # torch casts state to the parameter's dtype, which would round moments kept in a wider one.
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in saved["state"].items():
        held = optimizer.state[parameters[number]]
        for key, value in values.items():
            if isinstance(value, Tensor) and held[key].dtype != value.dtype:
                held[key] = value.to(held[key].device)


def weights_sha256(model: Module, whole: Mapping[str, Tensor] | None = None) -> str:
    """Return a digest over all weights and buffers, in the order of their names. Tensors that
    share memory count once, under the first name. The weights' file suffices to compute it.

    Args:
        whole: tensors in the place of those that are sharded.
    """
    tensors, _ = model_state(model)
    tensors |= whole or {}
    kept, _ = _without_aliases(tensors)
    digest = hashlib.sha256()
    for name in sorted(kept):
        data = kept[name].detach().cpu().resolve_conj().contiguous().reshape(-1)
        digest.update(data.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_state(model: Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of `model` by name, and what of its state JSON holds."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            rest[name] = pack(value, tensors, name)
    return tensors, rest


# ------------------------------------------------------------------ values


def pack(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """`value` as what JSON can hold, with its tensors moved to `tensors` under their paths.

    >>> pack({"betas": (0.9, 0.5)}, {}, "")
    {'items': [['betas', {'tuple': [0.9, 0.5]}]]}

    Raises:
        JobError: it holds something that neither JSON nor safetensors can.
    """
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        items: Mapping[Any, Any] = value
        if all(isinstance(key, (str, int)) for key in items):
            return {
                "items": [
                    [k, pack(v, tensors, f"{path}.{k}".lstrip("."))] for k, v in items.items()
                ]
            }
    if isinstance(value, (list, tuple)):
        entries: list[Any] | tuple[Any, ...] = value
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(v, tensors, f"{path}.{n}") for n, v in enumerate(entries)]}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        # JSON has no NaN or infinity; hexadecimal keeps every bit of all the others as well.
        return value if value - value == 0 else {"float": str(value)}
    raise JobError(
        f"the state at '{path}' holds a {type(value).__name__}, which cannot be saved without "
        "pickling; keep tensors, numbers, strings, lists and dicts there"
    )


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `pack`."""
    if not isinstance(packed, Mapping):
        return packed
    [(kind, content)] = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "items":
        return {key: unpack(value, tensors) for key, value in content}
    entries = [unpack(value, tensors) for value in content]
    return tuple(entries) if kind == "tuple" else entries


# ------------------------------------------------------------------ files


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by name, and {other name: name} for those that are the same memory."""
    first: dict[Any, str] = {}
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name in sorted(tensors):
        tensor = tensors[name]
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        same = first.setdefault(key, name) if tensor.numel() else name
        if same == name:
            kept[name] = tensor
        else:
            aliases[name] = same
    return kept, aliases


def prepared(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the real tensors that a file holds, which share no memory, and its metadata.
    Nothing is copied.
    """
    kept, aliases = _without_aliases(tensors)
    complexes = sorted(name for name, tensor in kept.items() if tensor.is_complex())
    plain = {
        name: torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()
        for name, t in kept.items()
    }
    # One entry: of several the order is the library's, another one in each process.
    return plain, {BESIDE: json.dumps({"aliases": aliases, "complex": complexes})}


def write_prepared(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write what `prepared` gave, or copies of that: the same bytes."""
    # Views of one storage (slices of one tensor) have to be copied; others are not.
    parted = {name: t.clone() if t._is_view() else t for name, t in tensors.items()}  # noqa: SLF001  # no public name
    try:
        save_file({name: t.contiguous() for name, t in parted.items()}, path, metadata)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            # Files of other writers have no such entry.
            extra = json.loads((file.metadata() or {}).get(BESIDE, "{}"))
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (SafetensorError, FileNotFoundError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error
    for name in extra.get("complex", ()):
        tensors[name] = torch.view_as_complex(tensors[name])
    for alias, name in extra.get("aliases", {}).items():
        tensors[alias] = tensors[name]
    return tensors


# ------------------------------------------------------------------ Snapshots
# Weights and optimizer state change only in the optimizer's step, at a boundary. So the writer
# copies the large tensors while the next window computes (`take`), and the next boundary waits for
# it; usually it is done by then. State that a window itself may change (buffers, small tensors
# such as a rate) is copied at once. The bytes written are the same either way.


SMALL = 4096
"""Numbers of a tensor that is copied at once."""


class Snapshot:
    """A checkpoint's tensors and the rest of it. Until `keep` they are the live ones.

    Args:
        model: its weights and buffers are saved.
        optimizer: its `state_dict()`; `copied`, if training does not change that one's tensors.
        precision: state of the loss scale.
        whole: copies of weights, in the place of those that are sharded.

    Attributes:
        taken: set once all tensors are copied, so training may change them.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Any,
        precision: dict[str, float],
        *,
        copied: bool,
        whole: Mapping[str, Tensor] | None = None,
    ) -> None:
        weights, rest = model_state(model)
        weights |= whole or {}
        states: dict[str, Tensor] = {}
        packed = pack(optimizer, states, "")
        self._extra = {"model": rest, "optimizer": packed, "precision": precision}
        self._files = {WEIGHTS: prepared(weights), OPTIMIZER: prepared(states)}
        self._lasting = {parameter.data_ptr() for parameter in model.parameters()}
        self._copied = {OPTIMIZER: copied, WEIGHTS: whole is not None}
        self._later: list[tuple[dict[str, Tensor], str]] = []
        self.taken = threading.Event()

    def keep(self) -> Snapshot:
        """Copy what a window may change; the next boundary has to wait for `taken`."""
        for name, (tensors, _) in self._files.items():
            for key, tensor in tensors.items():
                steady = (
                    name == OPTIMIZER or self._copied[name] or tensor.data_ptr() in self._lasting
                )
                if steady and tensor.numel() > SMALL:
                    if not self._copied[name]:
                        self._later.append((tensors, key))
                else:
                    tensors[key] = _copy(tensor)
        return self

    def take(self) -> None:
        """Copy the rest, in any thread. Sets `taken` even if it fails."""
        try:
            for tensors, key in self._later:
                tensors[key] = _copy(tensors[key])
        finally:
            self.taken.set()

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write weights and optimizer as safetensors; give the rest as JSON."""
        for name, (tensors, metadata) in self._files.items():
            write_prepared(folder / name, tensors, metadata)
        self._files.clear()  # copies are large
        return self._extra


def _copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in the host's memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
