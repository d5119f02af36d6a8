"""`make gpu-check`: what has to hold where there are GPUs, in ten minutes; a table and a file.

    python -m benchmarks.gpu_check [--transport nccl|gloo] [--ranks N] [--only NAME …] [--out FILE]
        [--on +cluster=slurm cluster.nodes=2 cluster.gpus_per_node=8 …]

Without GPUs, what does not need them runs over gloo. More ranks than GPUs share the first one, each
as a simulated node of its own: NCCL then sends over loopback, so bandwidth and speed mean nothing.
With `--on` the checks that start runs (resume, survival, failures) start them there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

from orchestrator import Loss
from orchestrator.engine.torch import Accumulator, TorchGroup
from orchestrator.engine.torch.conformance import all_checks
from orchestrator.engine.torch.group import BaseGroup
from orchestrator.errors import PeerLost
from orchestrator.jobs.digits import Digits
from orchestrator.local_ranks.processes import run_ranks

ROOT = Path(__file__).resolve().parent.parent
HALF = "bfloat16 parameters"
LATE_S = {"nccl": 30.0, "gloo": 2.0}
MIB = 2**20


class Skipped(Exception):
    """A check that this machine cannot make, with the reason."""


@dataclass(frozen=True)
class Machine:
    """The machine of the checks."""

    transport: str
    ranks: int
    folder: Path
    on: tuple[str, ...] = ()

    @property
    def gpus(self) -> bool:
        return self.transport == "nccl"

    @property
    def shared(self) -> bool:
        """Return True if ranks share a GPU."""
        return self.gpus and self.ranks > torch.cuda.device_count()

    @property
    def shape(self) -> tuple[str, ...]:
        """The settings of a run with these ranks: of one node, unless they share a GPU."""
        if self.on:
            return *self.on, "run.watch=true"
        nodes, width = (self.ranks, 1) if self.shared else (1, self.ranks)
        return f"cluster.nodes={nodes}", f"cluster.ranks_per_node={width}"

    def on_ranks(self, function: Callable[..., Any], *arguments: Any, ranks: int = 0) -> list[Any]:
        """Return the results of `function(group, *arguments)` on ranks of one node."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        return run_ranks(
            ranks or self.ranks,
            folder,
            function,
            *arguments,
            transport=self.transport,
            one_node=not self.shared,
            collective_timeout_s=60.0,
        )

    def need_gpus(self) -> None:
        if not self.gpus:
            raise Skipped("needs GPUs")

    def need_ranks(self, number: int) -> None:
        if self.ranks < number:
            raise Skipped(f"needs {number} ranks")


# ------------------------------------------------------------------ One loop for many checks


def _net(dtype: torch.dtype, device: torch.device, *, wide: int = 64) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(20, wide), nn.GELU(), nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, 5)
    return nn.Sequential(*layers).to(device, dtype)


def _data(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3, 61, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.to(device, dtype), x[..., :5].argmax(-1).to(device)


def _trained(
    group: BaseGroup,
    precision: str = "float32",
    *,
    compiled: bool = False,
    guarded: bool = False,
    leaf: int = 4,
    **options: Any,
) -> tuple[list[list[float]], list[float]]:
    """Train three windows of 61 samples, uneven over ranks, with one of them idle if possible."""
    dtype = {"float64": torch.float64, HALF: torch.bfloat16}.get(precision, torch.float32)
    precision = "float32" if precision == HALF else precision
    net = _net(dtype, group.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    accumulator = Accumulator(net, optimizer, group, clip_norm=0.5, precision=precision, **options)
    forward: Any = torch.compile(net) if compiled else net
    losses: list[float] = []
    for x, y in zip(*_data(dtype, group.device), strict=True):
        leaves = torch.arange(61).split(leaf)
        busy = group.size if group.size < 3 or "reduction" in options else group.size - 1
        numbers = torch.arange(len(leaves)).tensor_split(busy)
        mine = numbers[group.rank].tolist() if group.rank < busy else []
        for number in mine:
            batch = leaves[number]
            if guarded:  # from here to the boundary nothing may wait for the device
                torch.cuda.set_sync_debug_mode("error")
            with accumulator.precision.forward():
                total = cross_entropy(
                    forward(x[batch[0] : batch[-1] + 1]),
                    y[batch[0] : batch[-1] + 1],
                    reduction="sum",
                )
            accumulator.backward(Loss(total, len(batch)), last=number == mine[-1])
            if guarded:
                torch.cuda.set_sync_debug_mode("default")
        losses.append(accumulator.boundary().loss)
    return [p.detach().double().cpu().reshape(-1).tolist() for p in net.parameters()], losses


def _alone(precision: str, device: str) -> list[list[float]]:
    group = TorchGroup.alone(device=device)
    return _trained(group, precision)[0]


def _farthest(found: list[list[float]], wanted: list[list[float]]) -> float:
    both = [torch.tensor(flat, dtype=torch.float64) for one in (found, wanted) for flat in one]
    pairs = zip(both[: len(found)], both[len(found) :], strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def _expect(holds: bool, words: str) -> str:
    if not holds:
        raise AssertionError(words)
    return words


# ------------------------------------------------------------------ The checks


def versions(machine: Machine) -> str:
    """Report versions, the GPUs and how they are connected."""
    shm = shutil.disk_usage("/dev/shm").free // MIB  # noqa: S108  # NCCL's
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = [
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}",
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} CPUs",
        f"shared memory {shm} MiB, memlock {locked}",
    ]
    if machine.gpus:
        nccl: Any = getattr(torch.cuda, "nccl")  # noqa: B009
        found.append(f"NCCL {'.'.join(map(str, nccl.version()))}")
        count = torch.cuda.device_count()
        found += [str(torch.cuda.get_device_properties(n)) for n in range(count)]
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        found.append(f"peer access: {direct} of {len(pairs)} pairs")
        if shutil.which("nvidia-smi"):
            topology = subprocess.run(
                ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False
            )
            found.append(topology.stdout.strip())
    return "; ".join(found)


def _device(group: BaseGroup) -> tuple[str, str]:
    group.barrier()  # rank 0 has the store: if it left before, others could not finish connecting
    index = group.device.index or 0
    uuid = str(torch.cuda.get_device_properties(index).uuid) if group.device.type == "cuda" else ""
    return str(group.device), uuid


def binding(machine: Machine) -> str:
    """Each rank has the GPU of its local rank, and no two the same."""
    if machine.shared:
        raise Skipped("ranks share a GPU")
    found = machine.on_ranks(_device)
    if machine.gpus:
        _expect(len({uuid for _, uuid in found}) == machine.ranks, f"ranks share GPUs: {found}")
        return ", ".join(f"rank {rank}: {device}" for rank, (device, _) in enumerate(found))
    return _expect({device for device, _ in found} == {"cpu"}, "all on the CPU")


def _late(group: BaseGroup, late_s: float) -> float:
    if group.rank == 0:
        time.sleep(late_s)
    number = torch.ones(1, device=group.device)
    group.all_reduce_sum(number)
    return number.item()


def late_rank(machine: Machine) -> str:
    """A group works whose rank 0 is late at its first collective."""
    machine.need_ranks(2)
    late_s = LATE_S[machine.transport]
    found = machine.on_ranks(_late, late_s)
    return _expect(set(found) == {float(machine.ranks)}, f"rank 0 was {late_s:g} s late")


def conformance(machine: Machine) -> str:
    """The suite of groups: dtypes, empty and uneven tensors, strides, adjoints."""
    found = machine.on_ranks(all_checks)
    return _expect(set(found) == {machine.transport}, "the suite of groups passes")


def exactness(machine: Machine) -> str:
    """Uneven and idle ranks take the step of one big batch."""
    parts: list[str] = []
    bounds = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2, HALF: 5e-2}
    if machine.gpus:
        bounds["float16"] = 5e-2
        applied = machine.on_ranks(_overflows)
        _expect(all(one == [False, True] for one in applied), f"overflows: applied {applied}")
    device = "cuda" if machine.gpus else "cpu"
    for precision, bound in bounds.items():
        wanted = _alone(precision, device)
        for options in ({}, {"shard_optimizer": True}):
            found = machine.on_ranks(_Trained(precision, options))
            off = max(_farthest(weights, wanted) for weights, _ in found)
            _expect(off <= bound, f"{precision} {options}: off by {off:.1e}, at most {bound:g}")
            parts.append(f"{precision}{' sharded' if options else ''} {off:.0e}")
    return ", ".join(parts)


def _overflows(group: BaseGroup) -> list[bool]:
    """Return whether two float16 updates are applied, of which the last rank's first overflows."""
    net = _net(torch.float32, group.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    accumulator = Accumulator(net, optimizer, group, precision="float16")
    x, _ = _data(torch.float32, group.device)
    applied: list[bool] = []
    for factor in (1e6 if group.rank == group.size - 1 else 1.0, 1.0):
        with accumulator.precision.forward():
            total = net(x[0]).square().sum()
        accumulator.backward(Loss(total.float() * factor, 61))
        applied.append(accumulator.boundary().applied)
    return applied


@dataclass(frozen=True)
class _Trained:
    """`_trained` with options, as a function that can be sent to a process."""

    precision: str
    options: dict[str, Any]

    def __call__(self, group: BaseGroup) -> tuple[list[list[float]], list[float]]:
        return _trained(group, self.precision, **self.options)


class _SameBits(_Trained):
    def __call__(self, group: BaseGroup) -> tuple[list[list[float]], list[float]]:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
        return super().__call__(group)


def same_bits(machine: Machine) -> str:
    """Reproducible mode gives the same bits on every number of ranks; fast mode perhaps twice."""
    counts = [n for n in (1, 2, 3, 4, 8) if n <= machine.ranks]
    runs = [
        machine.on_ranks(_SameBits("float32", {"reduction": "reproducible"}), ranks=n)[0]
        for n in counts
    ]
    _expect(all(run == runs[0] for run in runs), f"reproducible on {counts} ranks: other bits")
    fast = [machine.on_ranks(_Trained("float32", {}))[0] for _ in range(2)]
    repeats = "repeats" if fast[0] == fast[1] else "does not repeat"
    return f"reproducible: one digest on {counts} ranks; fast {repeats} bit for bit"


def compiled(machine: Machine) -> str:
    """A compiled model takes the same step."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise Skipped("no compiler")
    wanted = _alone("float32", "cuda" if machine.gpus else "cpu")
    found = machine.on_ranks(_Trained("float32", {"compiled": True}))
    off = max(_farthest(weights, wanted) for weights, _ in found)
    return _expect(off <= 1e-2, f"off by {off:.0e}")


def silent_micro_steps(machine: Machine) -> str:
    """Within a window nothing waits for the device."""
    machine.need_gpus()
    machine.on_ranks(_Trained("float32", {"guarded": True}))
    syncs = max(machine.on_ranks(_boundary_syncs))
    return f"no synchronisation in a micro-step, {syncs} at a boundary"


def _boundary_syncs(group: BaseGroup) -> int:
    """Return how often the second boundary waits for the device."""
    net = _net(torch.float32, group.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
    accumulator = Accumulator(net, optimizer, group, clip_norm=0.5)
    x, y = _data(torch.float32, group.device)
    counts: list[int] = []
    for one_x, one_y in zip(x[:2], y[:2], strict=True):
        total = cross_entropy(net(one_x), one_y, reduction="sum")
        accumulator.backward(Loss(total, len(one_y)))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            accumulator.boundary()
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(one.message) for one in found))
    return counts[-1]


def _busy_stream(group: BaseGroup) -> bool:
    """Gradients that are still being computed when the boundary is called arrive all the same."""
    tensor = torch.zeros(2**20, device=group.device)
    torch.cuda._sleep(2 * 10**9)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # a second or so
    tensor += 1
    work = group.all_reduce_sum_async(tensor)
    work.wait()
    return bool((tensor == group.size).all())


def _two_streams(group: BaseGroup | None) -> list[list[float]]:
    """Return weights after an update whose forward uses a stream of the user's for one branch."""
    ours = group or TorchGroup.alone()
    torch.manual_seed(0)
    branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).to(ours.device)
    optimizer = torch.optim.SGD(branches.parameters(), lr=0.01)
    accumulator = Accumulator(branches, optimizer, ours, bucket_bytes=2**14)
    x = torch.ones(8, 64, device=ours.device)
    on_gpu = ours.device.type == "cuda"
    for _ in range(2):
        found = branches[0](x) + branches[2](x)
        with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else nullcontext():
            if on_gpu:
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                torch.cuda._sleep(10**8)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            other = branches[1](x) + branches[3](x)
            mine = torch.cuda.current_stream() if on_gpu else None
        if mine is not None:
            torch.cuda.current_stream().wait_stream(mine)
        accumulator.backward(Loss((found * other).sum(), 8), last=True)
        accumulator.boundary()
    return [p.detach().double().cpu().reshape(-1).tolist() for p in branches.parameters()]


def late_results(machine: Machine) -> str:
    """Collectives see what streams have not computed yet, one of the user's included."""
    off = max(_farthest(one, _two_streams(None)) for one in machine.on_ranks(_two_streams))
    found = _expect(off <= 1e-4, f"with a stream of the user's off by {off:.0e}")
    if machine.gpus:
        _expect(all(machine.on_ranks(_busy_stream)), "sums of a busy stream are right")
    return found


def _loses_a_peer(group: BaseGroup) -> str:
    group.barrier()
    if group.rank == group.size - 1:
        return "left"
    began = time.monotonic()
    try:
        _late(group, 0.0)
    except PeerLost as error:
        return f"PeerLost after {time.monotonic() - began:.0f} s: {error}"[:160]
    return "nothing was raised"


def lost_rank(machine: Machine) -> str:
    """A rank that ends is `PeerLost` on the others, in the thread that waits."""
    machine.need_ranks(2)
    found = machine.on_ranks(_loses_a_peer)
    _expect(all(words.startswith("PeerLost") for words in found[:-1]), str(found))
    return found[0]


def _orchestrator(*line: str) -> str:
    command = [sys.executable, "-m", "orchestrator", *line]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise AssertionError((done.stdout + done.stderr)[-2000:])
    return done.stdout


def _weights_of(run: Path, *line: str) -> str:
    _orchestrator(*line)
    return json.loads((run / "result.json").read_text(encoding="utf-8"))["weights_sha256"]


def resume(machine: Machine) -> str:
    """A run that ended early and goes on has the bits of an undisturbed one."""
    whole, parts = machine.folder / "whole", machine.folder / "parts"
    same = (
        "job=digits",
        *machine.shape,
        "accumulation.reduction=reproducible",
        "accumulation.micro_batch=16",
        f"transport={machine.transport}",
        "train.epochs=null",
    )
    digests = {_weights_of(whole, "launch", *same, f"run.dir={whole}", "train.updates=12")}
    background = "train.checkpoint_in_background=true"
    _orchestrator("launch", *same, background, f"run.dir={parts}", "train.updates=6")
    digests.add(_weights_of(parts, "resume", str(parts), "train.updates=12"))
    return _expect(len(digests) == 1, f"weights {min(digests)[:12]} after 12 updates")


class Fails(Digits):
    """Ends, hangs or runs out of memory on rank 1 in its third micro-step.

    Args:
        how: "raises", "memory", "loop", or "kernel", one that does not end.
    """

    def __init__(self, how: str, **others: Any) -> None:
        super().__init__(**others)
        self.how, self.calls = how, 0

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        self.calls += 1
        if os.environ["SLURM_PROCID"] == "1" and self.calls == 3:
            if self.how == "raises":
                raise ValueError("on purpose")
            if self.how == "memory":
                torch.empty(2**45, device=next(model.parameters()).device)
            if self.how == "kernel":
                torch.cuda._sleep(2**45)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            while self.how == "loop":
                pass
        return super().loss(model, batch)


def failures(machine: Machine) -> str:
    """A rank that fails is the one that is named, however it does."""
    machine.need_ranks(2)
    parts: list[str] = []
    causes = {"raises": "on purpose", "memory": "memory", "loop": "", "kernel": ""}
    if not machine.gpus:
        del causes["kernel"]
    for how, cause in causes.items():
        run, began = machine.folder / how, time.monotonic()
        line = (
            "launch",
            "job=digits",
            "job._target_=benchmarks.gpu_check.Fails",
            f"+job.how={how}",
            *machine.shape,
            f"transport={machine.transport}",
            f"run.dir={run}",
            "run.survive=false",
            "run.max_restarts=0",
            "cluster.hang_timeout_s=20",
            "cluster.collective_timeout_s=30",
        )
        command = [sys.executable, "-m", "orchestrator", *line]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        if not (run / "result.json").exists():
            raise AssertionError((done.stdout + done.stderr)[-2000:])
        culprit = json.loads((run / "result.json").read_text(encoding="utf-8"))["culprit"] or {}
        words = f"{how}: code {done.returncode}, rank {culprit.get('rank')}"
        named = culprit.get("rank") == 1 and cause in culprit["cause"]
        _expect(done.returncode == 1 and named, f"{words}: {culprit.get('cause')}")
        parts.append(f"{words} after {time.monotonic() - began:.0f} s")
    return ", ".join(parts)


def survival(machine: Machine) -> str:
    """Runs that lose workers and nodes, or stop, end as an undisturbed one does."""
    machine.need_ranks(3)
    reproducible = "accumulation.reduction=reproducible", "accumulation.micro_batch=16"
    rows: list[dict[str, Any]] = json.loads(
        _orchestrator(
            "rehearse",
            "--json",
            "--faults",
            "5",
            "--seed",
            "7",
            "--into",
            f"{machine.folder}/faults",
            "job=digits",
            *(machine.on or (f"cluster.nodes={machine.ranks}", "cluster.ranks_per_node=1")),
            f"transport={machine.transport}",
            "run.survive=true",
            *reproducible,
        )
    )["rows"]
    return ", ".join(f"{row['fault']}: {row['how']}" for row in rows)


def _fully_sharded(group: BaseGroup, folder: str, shape: tuple[int, ...]) -> float:
    """Train a sharded model; return how far it is from one process's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    kind = group.device.type
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/met-{len(shape)}",
        rank=group.rank,
        world_size=group.size,
    )
    mesh = init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    x, y = _data(torch.float64, group.device)
    net: Any = _net(torch.float64, group.device)
    plain = _net(torch.float64, group.device)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (net, plain)]
    accumulator = Accumulator(net, optimizers[0], clip_norm=0.5)
    for one_x, one_y in zip(x, y, strict=True):
        mine = torch.arange(60).tensor_split(group.size)[group.rank].split(5 + len(shape))
        for piece in mine:
            total = cross_entropy(net(one_x[piece]), one_y[piece], reduction="sum")
            accumulator.backward(Loss(total, len(piece)))
        accumulator.boundary()
        optimizers[1].zero_grad()
        cross_entropy(plain(one_x[:60]), one_y[:60]).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizers[1].step()
    found = [p.full_tensor().reshape(-1).tolist() for p in net.parameters()]
    dist.destroy_process_group()
    return _farthest(found, [p.detach().reshape(-1).tolist() for p in plain.parameters()])


def fully_sharded(machine: Machine) -> str:
    """FSDP2 and HSDP take the step of one big batch."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise Skipped(f"needs torch 2.13, this is {torch.__version__}")
    shapes: list[tuple[int, ...]] = [(machine.ranks,)]
    if machine.ranks % 2 == 0 and machine.ranks > 2:
        shapes.append((2, machine.ranks // 2))
    parts: list[str] = []
    for shape in shapes:
        off = max(machine.on_ranks(_fully_sharded, str(machine.folder), shape))
        parts.append(_expect(off <= 1e-9, f"mesh {shape} {off:.0e}"))
    return ", ".join(parts)


def _peak(group: BaseGroup, options: dict[str, Any]) -> tuple[int, int]:
    """Return the peak of a device's memory in two updates, and what weights, gradients and the
    optimizer's state take.
    """
    before = torch.cuda.memory_allocated(group.device)
    net = _net(torch.float32, group.device, wide=4000)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=False)
    accumulator = Accumulator(net, optimizer, group, **options)
    torch.cuda.reset_peak_memory_stats(group.device)
    x = torch.randn(8, 20, device=group.device)
    for _ in range(2):
        accumulator.backward(Loss(net(x).square().sum(), 8), last=True)
        accumulator.boundary()
    weights = 4 * accumulator.parameter_count()
    state = 2 * weights // (group.size if options.get("shard_optimizer") else 1)
    peak = torch.cuda.max_memory_allocated(group.device) - before
    return peak, weights + accumulator.gradient_bytes() + state


def memory(machine: Machine) -> str:
    """An update takes weights, gradients and the optimizer's state, and less than as much again."""
    machine.need_gpus()
    parts: list[str] = []
    for options in ({}, {"shard_optimizer": True}, {"reduction": "reproducible"}):
        peak, needed = max(machine.on_ranks(_peak, options))
        words = f"{options or 'fast'}: {peak // MIB} MiB of {needed // MIB} needed"
        parts.append(_expect(peak < 2 * needed, words))
    return ", ".join(parts)


_SCRIPT = re.compile(r"(?ms)^```python\n(# (windows|loop|same_bits)\.py\n.*?)^```")


def documented_scripts(machine: Machine) -> str:
    """The scripts of docs/how-to/library.md print the same numbers on one rank and on all."""
    if machine.shared:
        raise Skipped("ranks share a GPU")
    page = (ROOT / "docs" / "how-to" / "library.md").read_text(encoding="utf-8")
    prelude = ""
    if machine.gpus:
        page = page.replace('"gloo"', '"nccl"')
        page = page.replace("torch.Generator()", 'torch.Generator("cuda")')
        prelude = (
            "import os, torch\n"
            'os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")\n'
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'
            'torch.set_default_device("cuda")\n'
        )
    names: list[str] = []
    for source, name in _SCRIPT.findall(page):
        script = machine.folder / f"{name}.py"
        script.write_text(prelude + source, encoding="utf-8")
        found: list[list[float]] = []
        for ranks in (1, machine.ranks):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={ranks}", str(script)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
            if done.returncode:
                raise AssertionError((done.stdout + done.stderr)[-2000:])
            lines = (line.split() for line in done.stdout.splitlines())
            found.append([float(number) for line in lines for number in line[:2]])
        alike = [math.isclose(a, b, rel_tol=1e-4) for a, b in zip(*found, strict=True)]
        _expect(all(alike) and len(alike) > 1, f"{name}.py: {found}")
        names.append(f"{name}.py")
    return ", ".join(names)


def _timed(group: BaseGroup, ddp: bool) -> float:
    """Return the median seconds of an update with four micro-steps of a model of 20 MiB."""
    device = group.device
    net: Any = _net(torch.float32, device, wide=1600)
    x = torch.randn(64, 20, device=device)
    y = torch.zeros(64, dtype=torch.long, device=device)
    seconds: list[float] = []
    if ddp:
        net = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    accumulator = None if ddp else Accumulator(net, optimizer, group)
    for _ in range(25):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for step in range(4):
            last = step == 3
            if accumulator is not None:
                total = cross_entropy(net(x), y, reduction="sum")
                accumulator.backward(Loss(total, 64), last=last)
                continue
            net.require_backward_grad_sync = last
            (cross_entropy(net(x), y) / 4).backward()
        if accumulator is not None:
            accumulator.boundary()
        else:
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[5:])


def _ratio(group: BaseGroup, folder: str) -> float:
    dist.init_process_group(
        "nccl" if group.device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/ratio",
        rank=group.rank,
        world_size=group.size,
    )
    ours = min(_timed(group, ddp=False) for _ in range(2))
    theirs = min(_timed(group, ddp=True) for _ in range(2))
    dist.destroy_process_group()
    return ours / theirs


def speed(machine: Machine) -> str:
    """Report the time of an update relative to DDP with no_sync."""
    ratio = statistics.median(machine.on_ranks(_ratio, str(machine.folder)))
    return f"{ratio:.2f} of DDP + no_sync (K = 4)"


def _bandwidth(group: BaseGroup, mib: int) -> float:
    tensor = torch.ones(mib * MIB // 4, device=group.device)
    seconds: list[float] = []
    for _ in range(6):
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        group.all_reduce_sum(tensor)
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * (group.size - 1) / group.size * tensor.nbytes / min(seconds) / 1e9


def bandwidth(machine: Machine) -> str:
    """Report the bus bandwidth of an all-reduce."""
    sizes = (1, 16, 256, 1024) if machine.gpus else (1, 16)
    parts = [f"{mib} MiB: {max(machine.on_ranks(_bandwidth, mib)):.1f} GB/s" for mib in sizes]
    return ", ".join(parts)


CHECKS = (
    versions,
    binding,
    late_rank,
    conformance,
    exactness,
    same_bits,
    compiled,
    silent_micro_steps,
    late_results,
    lost_rank,
    failures,
    resume,
    survival,
    fully_sharded,
    memory,
    documented_scripts,
    speed,
    bandwidth,
)


def run_checks(
    transport: str, ranks: int, only: list[str], on: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Make the checks, one after the other, whatever comes of them."""
    rows: list[dict[str, Any]] = []
    # Other nodes see this folder, not /tmp.
    with tempfile.TemporaryDirectory(dir=Path.cwd() if on else None) as folder:
        machine = Machine(transport, ranks, Path(folder), tuple(on))
        for check in CHECKS:
            name = check.__name__.replace("_", " ")
            if only and name not in only:
                continue
            began, details = time.monotonic(), ""
            try:
                result, words = "pass", check(machine)
            except Skipped as reason:
                result, words = "skip", str(reason)
            except Exception as error:  # noqa: BLE001  # is the result
                result, words = "fail", f"{type(error).__name__}: {error}".splitlines()[0][:300]
                details = traceback.format_exc()
            row = {
                "check": name,
                "result": result,
                "words": words,
                "details": details,
                "meaning": check.__doc__,
                "seconds": round(time.monotonic() - began, 1),
            }
            rows.append(row)
            print(f"{result}  {row['seconds']:5.1f} s  {name:20} {words}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    gpus = torch.cuda.device_count()
    parser.add_argument("--transport", choices=["nccl", "gloo"], default="nccl" if gpus else "gloo")
    parser.add_argument("--ranks", type=int, default=gpus or 2, help="default: one for each GPU")
    parser.add_argument("--only", nargs="*", default=[], help="names of checks")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--on", nargs="*", default=[], help="overrides of runs: a cluster")
    given = parser.parse_args()
    rows = run_checks(given.transport, given.ranks, given.only, given.on)
    given.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(f"written: {given.out}; details of failures are in it")
    sys.exit(any(row["result"] == "fail" for row in rows))


if __name__ == "__main__":
    main()
