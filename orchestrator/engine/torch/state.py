"""Model and optimizer to files and back, to the bit: safetensors for tensors, plain JSON for the
rest.

Nothing is pickled. Tensors that share their memory are written once; the file's metadata names the
others.

Of a model in shards each rank of the first copy writes its shards of weights and optimizer state to
a file of its own, as the HuggingFaceStorageWriter of torch.distributed.checkpoint (DCP) lays it
out, and each rank reads through DCP what it will hold: on any number of ranks, in shards or whole.
DCP's own writer is not used: it plans a checkpoint by collectives, which a background thread must
not call while the main thread trains, and it builds each file in memory first.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.engine.common import packing
from orchestrator.engine.common.job_checks import check_fits, uncompiled
from orchestrator.engine.common.packing import unpack
from orchestrator.engine.torch.buffers import is_sharded, local_part, shard_like
from orchestrator.engine.torch.group import bytes_of
from orchestrator.errors import JobError, RunFolderError
from orchestrator.rundir.checkpoints import EXTRA, MODEL, SHARDS, WEIGHTS, part_name

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

OPTIMIZER = "optimizer.safetensors"


LiveTensorLookup = Callable[[str], Tensor | None]
"""Look up the tensor of this process for a saved name; None if it has none."""


def load_model(model: Module, folder: Path, rest: Mapping[str, Any]) -> None:
    """Load the weights that a `Snapshot` wrote, or this rank's shards of them. Not collective.

    Raises:
        RunFolderError: they are another model's.
    """
    own_tensors, _ = model_state(model)
    state = saved_model(folder, rest, own_tensors.get)
    state |= {n: shard_like(state[n], tensor) for n, tensor in own_tensors.items() if n in state}
    names = {uncompiled(name): name for name in model.state_dict()}
    try:
        model.load_state_dict({names.get(name, name): value for name, value in state.items()})
    except RuntimeError as error:
        raise RunFolderError(f"{folder} is of another model: {error}") from error


def saved_model(
    folder: Path, rest: Mapping[str, Any], live_tensor: LiveTensorLookup = lambda _: None
) -> dict[str, Any]:
    """Return the `state_dict()` that a `Snapshot` wrote."""
    tensors = _read_saved(folder, WEIGHTS, live_tensor)
    # Tensors within extra state were written under names that begin with its own.
    within = {name for name in tensors for key in rest if name.startswith(f"{key}.")}
    state: dict[str, Any] = {n: tensor for n, tensor in tensors.items() if n not in within}
    return state | {name: unpack(value, tensors) for name, value in rest.items()}


def export_state(folder: Path, extra: Mapping[str, Any], form: str, to: Path) -> None:
    """Write a checkpoint for other programs; see `Framework.export`.

    "torch" is a file for `torch.load(weights_only=True)`, "dcp" a folder for
    `torch.distributed.checkpoint.load`: `model`, and `optimizer` or the states of `run.windows`.
    """
    model = saved_model(folder, extra["model"])
    if form == "safetensors":  # others know no names for shared memory: each name has its own
        save_file({n: t.clone() for n, t in model.items() if isinstance(t, Tensor)}, to)
        return
    parts = unpack(extra["optimizer"], _read_saved(folder, OPTIMIZER))
    state = {"model": model, **(parts if "windows" in extra else {"optimizer": parts})}
    if form == "torch":
        with to.open("wb") as file:  # of a path torch wants a name with a suffix
            torch.save(state, file)
        return
    from torch.distributed.checkpoint.state_dict_saver import save  # takes a second to import

    with _without_collectives():
        save(state, checkpoint_id=to, no_dist=True)


@contextmanager
def _without_collectives() -> Generator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # by no_dist
        yield


def load_weights(model: Module, path: Path) -> None:
    """Set the tensors of `model` to those of a file; extra state that is none stays as it is.

    Whether either was compiled does not count. Of tensors that share memory one name suffices.

    Raises:
        ConfigError: names, shapes or dtypes are not the model's.
    """
    own_tensors, rest = model_state(model)
    within = tuple(f"{key}." for key in rest)
    loaded = {
        name: tensor
        for key, tensor in _read(path).items()
        if (name := uncompiled(key)) in own_tensors or not name.startswith(within)
    }
    _, aliases = _without_aliases(own_tensors)
    for alias, name in (*((name, alias) for alias, name in aliases.items()), *aliases.items()):
        if name in loaded:
            loaded.setdefault(alias, loaded[name])
    check_fits(_kinds(loaded), _kinds(own_tensors))
    with torch.no_grad():
        for name, tensor in own_tensors.items():
            tensor.copy_(shard_like(loaded[name], tensor))


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}


def load_optimizer(
    folder: Path,
    packed: Any,
    restore: Callable[[dict[str, Any]], None],
    optimizers: Mapping[str, Optimizer],
    others: Mapping[str, Tensor] | None = None,
) -> None:
    """Read the optimizer's state that a `Snapshot` wrote, and have `restore` take it.

    Args:
        optimizers: by the names under which their states were packed, "" for the only one.
        others: present tensors of further state, by their packed paths. What is read is sharded as
            they are.

    Raises:
        RunFolderError: it is another optimizer's state.
    """
    parameters = {
        name: [p for group in optimizer.param_groups for p in group["params"]]
        for name, optimizer in optimizers.items()
    }

    def live_tensor(path: str) -> Tensor | None:
        """Return the tensor whose sharding state has, from a path as in state.0.exp_avg."""
        if others and path in others:
            return others[path]
        match = re.match(r"(?:(.*?)\.)?state\.(\d+)\.", path)
        known = parameters.get(match[1] or "", []) if match else []
        number = int(match[2]) if match else 0
        return known[number] if number < len(known) else None

    saved = unpack(packed, _read_saved(folder, OPTIMIZER, live_tensor))
    try:
        restore(saved)
    except (ValueError, KeyError) as error:
        raise RunFolderError(f"{folder} is of another optimizer: {error}") from error


def load_job(folder: Path, packed: Any) -> Any:
    """Return the state of the job itself that a `Snapshot` wrote; None where there was none."""
    # Most jobs have none, or no tensors in it: then the file need not be read once more.
    tensors: dict[str, Tensor] = {}
    if '"tensor"' in json.dumps(packed):
        tensors = _read_saved(folder, OPTIMIZER)
    return unpack(packed, tensors)


MASTER = "master"
"""Name, in a saved state, of the float32 weights that a sharded optimizer steps in the place of
float16 or bfloat16 parameters."""


def restore_optimizer(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """`load_state_dict`, but to the bit, with strides that fused kernels can read, and without the
    masters of a sharded optimizer.
    """
    of_parameters = {n: s for n, s in saved["state"].items() if isinstance(s, Mapping)}
    states = {n: {k: v for k, v in s.items() if k != MASTER} for n, s in of_parameters.items()}
    optimizer.load_state_dict({**saved, "state": {**saved["state"], **states}})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in states.items():
        parameter, mastered = parameters[number], MASTER in saved["state"][number]
        own_state = optimizer.state[parameter]
        for key, value in values.items():
            if not isinstance(value, Tensor):
                continue
            like = parameter if value.shape == parameter.shape else value
            # torch casts state to the parameter's dtype, which would round moments kept in a wider
            # one. Those of a master were as wide as it was.
            narrowed = mastered and like is parameter and key != "step"
            dtype = parameter.dtype if narrowed else value.dtype
            wanted = torch.empty_like(like, dtype=dtype, device=own_state[key].device)
            if (own_state[key].dtype, own_state[key].stride()) != (wanted.dtype, wanted.stride()):
                own_state[key] = wanted.copy_(value)


def weights_sha256(model: Module, *, keep: bool = True) -> str:
    """Return a digest over all weights and buffers, in the order of their names. Tensors that
    share memory count once, under the first name. The weights' file suffices to compute it.

    Collective where they are in shards.

    Args:
        keep: the digest is wanted on this rank; elsewhere it is "".
    """
    tensors, _ = model_state(model)
    unaliased, _ = _without_aliases(tensors)
    digest = hashlib.sha256()
    for name in sorted(tensors):
        # One tensor at a time, since all of them may be too large for a host.
        tensor = tensors[name]
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        if keep and name in unaliased:
            digest.update(bytes_of(whole.cpu()).numpy().data)
    return digest.hexdigest() if keep else ""


def model_state(model: Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of `model` by name, and what of its state JSON holds. Names are the same
    whether it was compiled or not.

    Raises:
        JobError: a file can hold neither.
    """
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        name = uncompiled(key)
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                raise JobError(
                    f"{name} is stored as {value.layout}, which a file of weights cannot hold: "
                    "register it with persistent=False, and build it in model()"
                )
            tensors[name] = value
        else:
            rest[name] = pack(value, tensors, name)
    return tensors, rest


# ------------------------------------------------------------------ values


def pack(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return `packing.pack` of a state with tensors of torch."""
    return packing.pack(value, tensors, path, Tensor)


# ------------------------------------------------------------------ files


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors by name, and {other name: name} for those that are the same memory."""
    first: dict[Any, str] = {}
    unaliased: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name in sorted(tensors):
        tensor = local_part(tensors[name])
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        same = first.setdefault(key, name) if tensor.numel() else name
        if same == name:
            unaliased[name] = tensors[name]
        else:
            aliases[name] = same
    return unaliased, aliases


def prepared(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the real tensors that a file holds, which share no memory, and its metadata.
    Nothing is copied.
    """
    unaliased, aliases = _without_aliases(tensors)
    complexes = sorted(name for name, tensor in unaliased.items() if tensor.is_complex())
    plain = {
        name: torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach()
        for name, t in unaliased.items()
    }
    # One entry: of several the order is the library's, another one in each process.
    return plain, {EXTRA: json.dumps({"aliases": aliases, "complex": complexes})}


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            # Files of other writers have no such entry.
            extra = json.loads((file.metadata() or {}).get(EXTRA, "{}"))
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    except (SafetensorError, FileNotFoundError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error
    for name in extra.get("complex", ()):
        tensors[name] = torch.view_as_complex(tensors[name])
    for alias, name in extra.get("aliases", {}).items():
        tensors[alias] = tensors[name]
    return tensors


# ------------------------------------------------------------------ Shards
# A file of shards holds "model.<name>" and "optimizer.<path>", and in its metadata each shard's
# place in the whole tensor.


_PREFIXES = {WEIGHTS: MODEL, OPTIMIZER: "optimizer."}


def _prepared_shards(
    tensors: Mapping[str, Tensor], *, with_whole: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return this rank's shards, and the metadata of their file; see `prepared`.

    Args:
        with_whole: also tensors that every rank holds whole.
    """
    from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

    shards: dict[str, Tensor] = {}
    offsets: dict[str, Any] = {}
    unaliased, _ = _without_aliases(tensors)
    for name, tensor in tensors.items():
        local = local_part(tensor).detach()
        if name not in unaliased:  # DCP knows no names for shared memory
            local = local.clone()
        if local.dtype == torch.complex128:
            raise JobError(f"{name} is complex128, which a file of shards cannot hold")
        if is_sharded(tensor):
            if local.numel() or not tensor.numel():
                [item] = create_default_local_save_plan({name: tensor}, True).items
                assert item.tensor_data is not None  # noqa: S101  # as of every tensor
                shards[name] = local
                offsets[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        elif with_whole:
            shards[name], offsets[name] = local, {"saved_offsets": [0] * local.ndim}
    return shards, {SHARDS: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}


def _read_saved(
    folder: Path, kind: str, live_tensor: LiveTensorLookup = lambda _: None
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint's weights or optimizer: whole, or where it was saved in
    shards and `live_tensor` gives a sharded tensor of the same shape, this rank's shards.
    """
    if not (folder / part_name(0)).exists():
        return _read(folder / kind)
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader, prefix = HuggingFaceStorageReader(str(folder)), _PREFIXES[kind]
    tensors: dict[str, Any] = {}
    metadata = cast("dict[str, TensorStorageMetadata]", reader.read_metadata().state_dict_metadata)
    for name, about in metadata.items():
        if name.startswith(prefix):
            like, dtype = live_tensor(name.removeprefix(prefix)), about.properties.dtype
            if like is not None and is_sharded(like) and like.shape == about.size:
                tensors[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)
            else:
                tensors[name] = torch.empty(about.size, dtype=dtype)
    with _without_collectives():
        load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


# ------------------------------------------------------------------ Snapshots
# Weights and optimizer state change only in the optimizer's step, at a boundary. So the writer
# copies the large tensors while the next window computes (`take`), and the next boundary waits for
# it; usually it is done by then. State that a window itself may change (buffers, small tensors
# such as a rate) is copied at once. The bytes written are the same either way.


SMALL = 4096
"""Numbers of a tensor that is copied at once."""


class Snapshot:
    """A checkpoint's tensors, and the rest of it as what JSON holds. Until `keep` the tensors are
    the live ones.

    Args:
        optimizer: its `state_dict()`; `copied`, if training does not change that one's tensors.
        extra: further entries of the rest.
        job: the state of the job itself, see `load_job`.
        part: the number of this rank's part of the checkpoint where ranks save it in parts, -1 on
            ranks that save none; None where one rank saves all of it.

    Attributes:
        taken: set once all tensors are copied, so training may change them.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Any,
        extra: Mapping[str, Any],
        *,
        job: Any = None,
        copied: bool = False,
        part: int | None = None,
    ) -> None:
        weights, rest = model_state(model)
        states: dict[str, Tensor] = {}
        packed = pack(optimizer, states, "")
        self._copied = {tensor.data_ptr() for tensor in states.values()} if copied else set[int]()
        lasting = (*model.parameters(), *states.values())
        self._lasting = {local_part(tensor).data_ptr() for tensor in lasting}
        packed_job = pack(job, states, "job")
        self._extra = {"model": rest, "optimizer": packed, "job": packed_job, **extra}
        if part is None:
            self._files = {WEIGHTS: prepared(weights), OPTIMIZER: prepared(states)}
        else:
            both = {_PREFIXES[WEIGHTS] + name: tensor for name, tensor in weights.items()}
            both |= {_PREFIXES[OPTIMIZER] + name: tensor for name, tensor in states.items()}
            shards = _prepared_shards(both, with_whole=part == 0)
            self._files = {part_name(part): shards} if part >= 0 else {}
        self._later: list[tuple[dict[str, Tensor], str]] = []
        self._computed: Any = None  # an event of a GPU: they hold what they do at the boundary
        self.taken = threading.Event()

    def keep(self) -> Snapshot:
        """Copy what a window may change; the next boundary has to wait for `taken`."""
        for tensors, _ in self._files.values():
            for key, tensor in tensors.items():
                if tensor.data_ptr() not in self._lasting or tensor.numel() <= SMALL:
                    tensors[key] = _copy(tensor)
                elif tensor.data_ptr() not in self._copied:
                    self._later.append((tensors, key))
                    if tensor.is_cuda and self._computed is None:
                        self._computed = torch.cuda.current_stream(tensor.device).record_event()
        return self

    def take(self) -> None:
        """Copy the rest, in any thread. Sets `taken` even if it fails."""
        try:
            if self._computed is not None:
                self._take_from_gpu()
            else:
                for tensors, key in self._later:
                    tensors[key] = _copy(tensors[key])
        finally:
            self.taken.set()

    def _take_from_gpu(self) -> None:
        """Copy the rest without holding up the training's kernels.

        A plain copy would queue up in the stream of the training, and pageable memory makes it
        slow. So this one has a stream of its own, which first waits for `_computed`, and pinned
        memory. Other accelerators take the plain one.
        """
        piece_bytes = 2**26
        pinned = torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=True)
        stream = torch.cuda.Stream(self._computed.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._computed)
            for tensors, key in self._later:
                whole = torch.empty(tensors[key].shape, dtype=tensors[key].dtype)
                sources = bytes_of(tensors[key]).split(piece_bytes)
                targets = bytes_of(whole).split(piece_bytes)
                for source, target in zip(sources, targets, strict=True):
                    pinned[: len(source)].copy_(source, non_blocking=True)
                    stream.synchronize()
                    target.copy_(pinned[: len(source)])
                tensors[key] = whole

    def save_state(self, folder: Path) -> dict[str, Any]:
        """Write the tensors as safetensors; give the rest as what JSON can hold."""
        for name, (tensors, metadata) in self._files.items():
            # Views of one storage (slices of one tensor) have to be copied; others are not.
            parted = {name: t.clone() if t._is_view() else t for name, t in tensors.items()}  # noqa: SLF001  # no public name
            path = folder / name
            try:
                save_file({name: t.contiguous() for name, t in parted.items()}, path, metadata)
            except SafetensorError as error:
                raise OSError(f"{path} cannot be written: {error}") from error
        self._files.clear()  # copies are large
        return self._extra


def _copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in the host's memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
