"""A simulated GPU for scripts that name `cuda` without asking: its tensors lie in CPU memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

NOTHING = (
    "synchronize",
    "set_device",
    "empty_cache",
    "manual_seed",
    "manual_seed_all",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "init",
    "set_per_process_memory_fraction",
)
ZERO = (
    "current_device",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "utilization",
)
_torch_device = torch.device


def _is_cuda(value: Any) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return True  # a number as a device is an accelerator's
    if isinstance(value, str):
        return value == "cuda" or value.startswith("cuda:")
    return isinstance(value, _torch_device) and value.type == "cuda"


class SimulatedStream:
    """A stream, or event, of work that is done when it is launched."""

    cuda_stream = stream_id = device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = _torch_device("cuda")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def is_capturing(self) -> bool:
        """Return False: nothing captures a graph of kernels."""
        return False

    def query(self) -> bool:
        """Return True: the work is done."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Return 0.0 ms: nothing is measured."""
        del end_event
        return 0.0

    def record_event(self, event: Any = None) -> Any:
        """Return the event."""
        return event or SimulatedStream()

    def synchronize(self, *_: Any) -> None:
        """Return at once."""

    record = wait = wait_event = wait_stream = synchronize


class CudaOnCpu(TorchFunctionMode):
    """Mode in which calls that name a CUDA device run on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and _is_cuda(args[1] if len(args) > 1 else None):
            args = (args[0], "cpu", *args[2:])
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def simulate() -> None:
    """Let this process see one GPU for each of its node's ranks."""
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.get_device_name = lambda *_, **__: "a simulated GPU"
    cuda.get_device_capability = lambda *_, **__: (9, 0)
    cuda.is_bf16_supported = lambda *_, **__: True
    for name in NOTHING:
        setattr(cuda, name, lambda *_, **__: None)
    for name in ZERO:
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.is_current_stream_capturing = lambda: False
    _simulate_streams(cuda)
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda *_, **__: None
    cuda.get_rng_state_all = lambda: [torch.get_rng_state()]
    torch.nn.Module.cuda = lambda self, *_, **__: self
    _simulate_accelerator()
    move = torch.nn.Module.to

    @functools.wraps(move)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_cuda(args[0] if args else None):  # else it would be looked for before any tensor
            args = ("cpu", *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return move(self, *args, **kwargs)

    torch.nn.Module.to = to
    _on_cpu(torch.amp, "GradScaler")
    _on_cpu(torch, "autocast")
    torch.amp.autocast = torch.autocast
    cuda.amp.GradScaler = functools.partial(torch.amp.GradScaler, "cpu")
    cuda.amp.autocast = functools.partial(torch.autocast, "cpu")
    _install_groups()
    CudaOnCpu().__enter__()


def _simulate_streams(module: Any) -> None:
    for name in ("Stream", "Event", "current_stream", "default_stream", "stream"):
        if hasattr(module, name):
            setattr(module, name, SimulatedStream)


def _simulate_accelerator() -> None:
    """Let `torch.accelerator` see the same GPUs."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:  # torch before 2.6
        return
    for name in NOTHING:
        if hasattr(accelerator, name):
            setattr(accelerator, name, lambda *_, **__: None)
    for name in ("set_device_index", "set_device_idx", "set_stream"):
        if hasattr(accelerator, name):
            setattr(accelerator, name, lambda *_, **__: None)
    for name in ("current_device_index", "current_device_idx", *ZERO):
        if hasattr(accelerator, name):
            setattr(accelerator, name, lambda *_, **__: 0)
    _simulate_streams(accelerator)
    accelerator.is_available = lambda: True
    accelerator.device_count = torch.cuda.device_count
    accelerator.current_accelerator = lambda *_, **__: _torch_device("cuda")


def _on_cpu(module: Any, name: str) -> None:
    """Make a class take "cuda", its first argument, for "cpu"."""
    original = getattr(module, name)

    class OnCpu(original):
        def __init__(self, device: Any = "cpu", *args: Any, **kwargs: Any) -> None:
            if "device_type" in kwargs:
                device = kwargs.pop("device_type")
            if kwargs.get("dtype") is torch.float16 and name == "autocast":
                kwargs["dtype"] = torch.bfloat16
            super().__init__("cpu" if _is_cuda(device) else device, *args, **kwargs)

    OnCpu.__name__ = OnCpu.__qualname__ = name
    setattr(module, name, OnCpu)


def _install_groups() -> None:
    """Let groups of nccl be groups of gloo, and DDP ignore the numbers of devices."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    dist.is_nccl_available = lambda: True
    for name in ("init_process_group", "new_group"):
        original = getattr(dist, name)
        replaced = _with_gloo(original)
        setattr(dist, name, replaced)
        setattr(dist.distributed_c10d, name, replaced)
    barrier = dist.barrier

    def without_devices(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        return barrier(*args, **kwargs)

    dist.barrier = without_devices
    ddp = torch.nn.parallel.DistributedDataParallel
    build = ddp.__init__

    @functools.wraps(build)
    def on_cpu(self: Any, module: Any, *_: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        build(self, module, **kwargs)

    ddp.__init__ = on_cpu


def _with_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if "nccl" in str(kwargs.get("backend") or ""):
            kwargs["backend"] = "gloo"
        if args and "nccl" in str(args[0]):
            args = ("gloo", *args[1:])
        kwargs.pop("device_id", None)
        return original(*args, **kwargs)

    return wrapped
