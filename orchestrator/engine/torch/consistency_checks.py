"""Checks that all ranks are alike: machines, models and optimizers at the start, weights later."""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby, starmap, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from orchestrator.engine.api import AccumulationOptions, EngineSettings
from orchestrator.engine.common.job_state import JobState
from orchestrator.engine.common.replicas import (
    LARGEST_PIECE,
    ReplicaChecker,
    WeightRange,
    folded,
    minority_ranks,
    partition_weights,
)
from orchestrator.engine.torch.buffers import Named, is_sharded, local_part
from orchestrator.engine.torch.group import (
    BaseGroup,
    broadcast_tensors,
    flatten,
    gather_numbers,
    gather_texts,
    ranks_where,
)
from orchestrator.engine.torch.state import pack
from orchestrator.errors import JobError
from orchestrator.units import named_ranks

# ------------------------------------------------------------------ Equal machines


_KERNEL_VARIABLES = (
    # ATen's, MKL's and oneDNN's kernels are chosen by them (besides by the processor),
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    # those of CUDA's libraries,
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "NVIDIA_TF32_OVERRIDE",
    # and NCCL's order of sums.
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
)
_VECTOR_INSTRUCTIONS = (
    *("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni"),
    *("amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "fphp", "sve", "sve2", "bf16", "i8mm"),
)


@functools.cache
def processor() -> str:
    """Return the processor's maker and vector instructions, by which libraries choose kernels:
    "GenuineIntel avx2 fma avx512f", say.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return platform.machine()
    fields = {name.strip(): text.strip() for name, _, text in (s.partition(":") for s in lines)}
    maker = fields.get("vendor_id") or fields.get("CPU implementer") or platform.machine()
    flags = {*(fields.get("flags") or fields.get("Features") or "").split()}
    return " ".join([maker, *(name for name in _VECTOR_INSTRUCTIONS if name in flags)])


def versions() -> dict[str, str]:
    """Return the versions of libraries and devices. Equal facts, equal bits."""
    facts: dict[str, str] = {
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "cpu": processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "matmul": _float32_precision(),
    }
    for name in ("cuda", "hip"):
        if version := getattr(torch.version, name):
            facts[name] = version
    for name in _KERNEL_VARIABLES:
        if name in os.environ:
            facts[name] = os.environ[name]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["gpu"] = f"{gpu.name} {gpu.major}.{gpu.minor} {gpu.multi_processor_count}"
        facts["cudnn"] = str(torch.backends.cudnn.version())
        internals: Any = getattr(torch, "_C")  # noqa: B009
        facts["driver"] = str(internals._cuda_getDriverVersion())  # noqa: SLF001  # no public name
        cuda: Any = torch.backends.cuda
        kernels = ("flash", "mem_efficient", "math", "cudnn")
        enabled = [name for name in kernels if getattr(cuda, f"{name}_sdp_enabled")()]
        facts["attention"] = " ".join(enabled)
        if dist.is_nccl_available():
            nccl: Any = getattr(torch.cuda, "nccl")  # noqa: B009  # not declared in torch.cuda
            facts["nccl"] = ".".join(str(part) for part in nccl.version())
    return facts


def _float32_precision() -> str:
    """Return how float32 matrix products and convolutions may round: TF32, say.

    The older way to ask raises where the newer one was used to set it.
    """
    backends: Any = torch.backends
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        return f"{torch.get_float32_matmul_precision()} {backends.cudnn.allow_tf32}"
    parts = backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.cudnn.rnn
    return " ".join(part.fp32_precision for part in parts)


def machine_warning(
    gather: Callable[[Sequence[float]], list[list[float]]], reduction: str
) -> list[str]:
    """Return a sentence when ranks compute with different versions, threads or devices, which
    decide the bits of a kernel. Collective.

    Args:
        gather: every rank's numbers, a row for each rank; collective.
    """
    facts = {**versions(), "machine": platform.machine()}
    odd = minority_ranks(gather([float(folded(sorted(facts.items())))]))
    if not odd:
        return []
    price = (
        "the bits of the result may depend on who computes which leaf"
        if reduction == "reproducible"
        else "results may not repeat to the bit"
    )
    verb = "computes" if len(odd) == 1 else "compute"
    sentence = (
        f"{named_ranks(odd)} {verb} with another version of torch, number of threads, kind of "
        f"processor or rounding (TF32) than the others: {price}"
    )
    return [sentence]


# ------------------------------------------------------------------ Equal start
# Gradients are summed whatever they belong to, so nothing later would reveal ranks that began with
# other weights. Ranks compare digests when an accumulator is built, with one small exchange; where
# they differ, a second one tells which ranks differ in what.


class Trait(NamedTuple):
    """Something that has to be equal on all ranks. `of_tensor`: the numbers of one of the model."""

    what: str
    value: str
    of_tensor: bool = False


def _numbers_of(name: str, tensor: Tensor) -> Trait:
    return Trait(f"the numbers of {name}", digest_of(tensor), of_tensor=True)


def check_same_start(
    group: BaseGroup,
    model: Any,
    named: Named,
    optimizer: Optimizer,
    options: AccumulationOptions,
    replicate_group: BaseGroup,
    replicate_ranks: Sequence[int],
) -> None:
    """Check that all ranks begin with the same. Collective.

    Args:
        replicate_group: those whose numbers are the same: all, unless the model is sharded.
        replicate_ranks: their numbers in `group`.
        named: the parameters of the model, trained or not.
        options: of the accumulator. With `broadcast` all ranks are first given rank 0's parameters
            and buffers.

    Raises:
        JobError: on all ranks alike, naming those that differ, and in what first.
    """
    if group.size == 1:
        return
    buffers = list(model.named_buffers()) if isinstance(model, Module) else []
    tensors = [*named, *buffers]
    whole = [(name, tensor) for name, tensor in tensors if not is_sharded(tensor)]
    shards = [(name, local_part(tensor)) for name, tensor in tensors if is_sharded(tensor)]
    shapes = [
        Trait(f"the accumulator's {name}", repr(value))
        for name, value in options.shared_by_ranks().items()
    ]
    for kind, listed in (("parameter", named), ("buffer", buffers)):
        for number, (name, tensor) in enumerate(listed):
            form = f"{tensor.dtype} {tuple(tensor.shape)}".removeprefix("torch.")
            form += ", trained" if tensor.requires_grad else ""
            shapes.append(Trait(f"{kind} number {number}", f"{name} ({form})"))
    # A job class has no accumulator of its own.
    in_loop = not isinstance(options, EngineSettings)
    if options.broadcast:
        check_same_traits(group, shapes)  # first: broadcasts of other sizes could hang
        broadcast_tensors(group, [tensor for _, tensor in whole])
        broadcast_tensors(replicate_group, [tensor for _, tensor in shards])
    name_of = {id(tensor): name for name, tensor in reversed(named)}
    for_all = [*shapes, *starmap(_numbers_of, whole)]
    for_all.append(Trait("the optimizer", type(optimizer).__qualname__))
    for number, settings in enumerate(optimizer.param_groups):
        for key, value in sorted(settings.items()):
            if key == "params":
                value = [name_of.get(id(parameter)) for parameter in value]  # noqa: PLW2901
            for_all.append(Trait(f"{key} of the optimizer's group {number}", digest_of(value)))
    of_replicas = [*starmap(_numbers_of, shards)]
    for owner, state in optimizer.state.items():
        if not isinstance(state, Mapping):  # a number that the optimizer keeps for itself
            of_replicas.append(Trait(f"the optimizer's {owner}", digest_of(state)))
            continue
        entries: Mapping[Any, Any] = state
        for key in sorted(entries, key=str):
            what = f"the optimizer's {key} of {name_of.get(id(owner))}"
            of_replicas.append(Trait(what, digest_of(entries[key])))
    if not shards:
        check_same_traits(group, [*for_all, *of_replicas], in_loop=in_loop)
        return
    check_same_traits(group, for_all, in_loop=in_loop)
    error: JobError | None = None
    try:
        check_same_traits(replicate_group, of_replicas, replicate_ranks)
    except JobError as difference:
        error = difference
    # Ranks of other copies fail as well, rather than wait for these in the next collective.
    odd = ranks_where(group, error is not None)
    if error is not None:
        raise error
    if odd:
        raise JobError(f"the shards of {named_ranks(odd)} are not the same in all copies")


def check_same_traits(
    group: BaseGroup,
    traits: Sequence[Trait],
    numbers: Sequence[int] | None = None,
    *,
    in_loop: bool = True,
) -> None:
    """Raise `JobError`, on all ranks alike, unless all have the same traits. Collective.

    Args:
        in_loop: the accumulator is the user's own, for advice.
        numbers: of the group's ranks, for messages, where they are a part of all.
    """
    odd = minority_ranks(gather_numbers(group, [float(folded(traits))]))
    if not odd:
        return
    usual_rank = min({*range(group.size)}.difference(odd))  # any of the majority: equal digests
    # Two ranks alone send all their traits: of thousands they would fill the memory of each.
    compared = group.rank in (usual_rank, odd[0])
    texts = gather_texts(group, json.dumps(list(traits) if compared else []))
    usual, odd_traits = (
        [Trait(*values) for values in json.loads(texts[rank])] for rank in (usual_rank, odd[0])
    )
    numbers = [(numbers or range(group.size))[rank] for rank in odd]
    who, verb = named_ranks(numbers), "differ" if len(odd) > 1 else "differs"
    pairs = list(zip_longest(usual, odd_traits, fillvalue=Trait("", "nothing")))
    trait, other = next((a, b) for a, b in pairs if a != b)
    if trait.of_tensor:
        count = sum(a != b and a.of_tensor for a, b in pairs)
        raise JobError(
            f"the model is not the same on every rank: {who} {verb} from the others in {count} of "
            f"its tensors, first in {trait.what}. Build the model from one seed on every rank "
            "(torch.manual_seed), or load the same file"
            + "; Accumulator(..., broadcast=True) gives all ranks rank 0's numbers, as DDP does"
            * in_loop
        )
    raise JobError(
        f"ranks do not start alike: {who} {verb} from the others, first in {trait.what}: it is "
        f"{other.value} on rank {numbers[0]}, and {trait.value} on others"
    )


def check_same_job_state(group: BaseGroup, state: JobState) -> None:
    """Check that what a job saves of itself is the same on all ranks. Collective.

    Raises:
        JobError: on all ranks alike.
    """
    if group.size > 1 and state.saved:
        tensors: dict[str, Tensor] = {}
        packed = pack(state.state(), tensors, "")
        digests = [(name, digest_of(tensor)) for name, tensor in tensors.items()]
        state.check_same(gather_numbers(group, [float(folded([json.dumps(packed), *digests]))]))


def digest_of(value: Any) -> str:
    """Return a tensor's digest; a function's name; anything else as Python's repr."""
    if callable(value):  # whose repr holds an address
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if not isinstance(value, Tensor):
        return repr(value)
    tensor = local_part(value)
    partitions = partition_weights([tensor.numel()], [tensor.element_size()])
    pieces = [piece for partition in partitions for piece in partition]
    return f"{folded(digests_of([tensor], pieces)):x}"


# ------------------------------------------------------------------ Weights digest
# A sum, modulo 2**64, of the weights' bits times odd numbers. Each place has its own odd 64-bit
# number, so any change of one number changes the sum, and so do two that swap places. It runs at
# some 5 GB/s on a CPU core, and only the sums leave a device. It detects drift, not an adversary.


_ROWS = 128  # of `LARGEST_PIECE` numbers, as int64: 64 MiB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2**64 / golden ratio: its multiples are spread evenly
_MIX = 0xBF58476D1CE4E5B9 - 2**64  # of SplitMix64 [Steele, Lea and Flood 2014]


@lru_cache(maxsize=8)
def _multipliers(device: torch.device) -> Tensor:
    """Odd 64-bit numbers, the same on every machine: as many as the largest piece may need."""
    mixed = torch.arange(1, 4 * LARGEST_PIECE + 1, dtype=torch.int64) * _ODD
    mixed = (mixed ^ (mixed >> 30)) * _MIX
    return ((mixed ^ (mixed >> 27)) | 1).to(device)


def _sums_together(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the weighted sum of each part, in few kernels, as a device wants it."""
    sums: list[Tensor] = []
    for _, alike in groupby(parts, key=lambda part: (part.device, part.dtype, len(part))):
        rows = list(alike)
        for first in range(0, len(rows), _ROWS):
            some = torch.stack(rows[first : first + _ROWS])
            sums += (some * _multipliers(some.device)[: some.shape[1]]).sum(1).unbind()
    return sums


def digests_of(
    parameters: Sequence[Tensor], pieces: Sequence[WeightRange], *, joint: bool = False
) -> list[int]:
    """Return a digest of each piece, of its values now.

    Args:
        joint: pieces that are small and alike may have one digest together, which takes less time.
    """
    parts: list[Tensor] = []
    devices: set[torch.device] = set()
    dtypes: set[torch.dtype] = set()
    for piece in pieces:
        numbers = flatten(parameters[piece.number].detach().reshape(-1)[piece.start : piece.end])
        parts.append(numbers.view(_BITS[min(numbers.element_size(), 4)]))
        devices.add(numbers.device)
        dtypes.add(parts[-1].dtype)
    alike = len(devices) == len(dtypes) == 1
    if joint and alike and sum(map(len, parts)) <= LARGEST_PIECE:
        parts = [torch.cat(parts)]
    if devices == {torch.device("cpu")}:
        odd = _multipliers(torch.device("cpu"))
        sums = [(part * odd[: len(part)]).sum() for part in parts]
    else:
        sums = _sums_together(parts)
    if len(devices) == 1:
        return torch.stack(sums).tolist()  # one wait for the device, not one a piece
    return list(map(int, sums))


def replica_checker(
    named: Named, group: BaseGroup, numbers: Sequence[int] | None = None
) -> ReplicaChecker:
    """Return the detector of parameters, trained or not, that differ between ranks.

    Args:
        numbers: of the group's ranks, for messages, where they are a part of all.
    """
    parameters = [local_part(parameter) for _, parameter in named]
    return ReplicaChecker(
        [name for name, _ in named],
        [parameter.numel() for parameter in parameters],
        [parameter.element_size() for parameter in parameters],
        digests=partial(digests_of, parameters),
        gather=partial(gather_numbers, group),
        ranks=group.size,
        numbers=numbers,
        joint_digests=partial(digests_of, parameters, joint=True),
    )
