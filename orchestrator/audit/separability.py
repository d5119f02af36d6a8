"""A test of whether the samples of a micro-step influence one another.

The operations of a micro-step are recorded below autograd and replayed on copies, with rows of the
data replaced. Where samples are separable,

- replacing the row of one sample changes elements of the loss that no other sample's row changes;
- replacing all rows but one leaves the elements of that sample as they were.

Any other dependence (statistics or attention over the micro-batch, weights that are normalised in
it, other samples as targets) breaks one of the two. A replay runs no code of the script, no hook
and no collective, and writes to no tensor of the script. What a replay cannot show, such as a value
that left torch for numpy and came back, is named instead of guessed.
"""

from __future__ import annotations

import inspect
import math
import sysconfig
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils._python_dispatch as python_dispatch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

MOST_BYTES = 2**32
"""Of the tensors that are kept for a replay."""
LARGEST_COPY = 2**22
"""Elements of a tensor that is copied before the script writes to it."""
SAME = 1e-6
"""Elements that differ by less, relative to the largest, are equal: kernels may round otherwise."""
QUICK_S = 0.1
"""A replay that takes longer is repeated for fewer samples."""
MANY, FEW = 8, 3
SELECTIONS = frozenset(
    {
        "index",
        "index_select",
        "select",
        "slice",
        "narrow",
        "split",
        "split_with_sizes",
        "unbind",
        "stack",
        "cat",
        "view",
        "_unsafe_view",
        "reshape",
        "unsqueeze",
        "squeeze",
        "permute",
        "t",
        "transpose",
        "clone",
        "_to_copy",
        "alias",
        "detach",
        "lift_fresh",
        "expand",
        "as_strided",
        "unfold",
        "gather",
        "take",
        "chunk",
    }
)
"""Operations after which data are still data: they choose and arrange, and compute nothing."""
ARITHMETIC = frozenset({"add", "sub", "rsub", "mul", "div", "pow", "add_", "sub_", "mul_", "div_"})
ESCAPES = ("numpy", "__array__", "tolist")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})
_OWN = str(Path(__file__).parent)


UNCHANGED = "replaced samples do not change the loss"


class UntestableError(Exception):
    """A micro-step cannot be replayed; the message says why."""


@dataclass(eq=False)
class Operation:
    """One operation, with its tensors alive."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    outputs: list[Tensor]
    written: list[Tensor]
    random: Tensor | None
    where: str

    @property
    def name(self) -> str:
        return self.function.overloadpacket.__name__

    def __str__(self) -> str:
        return f"{self.name} at {self.where}" if self.where else self.name


@dataclass
class Probe:
    """The result of the test of one micro-step.

    Attributes:
        backward: the number of its backward pass.
        mixed: how samples influence one another.
        untested: what could not be tested.
        free: numbers of loss terms that no sample changes, such as a norm of the weights.
        constants: numbers and tensors from outside that elements depend on, besides data and
            weights. They must be alike in all micro-steps of a window.
        own_sum: a sum over the micro-batch's samples that the loss's elements are divided by; None
            if there is none, or if samples influence one another otherwise, too.
    """

    backward: int
    mixed: str | None = None
    untested: str | None = None
    free: list[int] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    own_sum: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _storage(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return storage._cdata  # noqa: SLF001


def _flat(values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def _results(values: Any, count: int) -> list[Tensor | None]:
    """Return the tensors of a result; None for one that only a gradient needs, such as a workspace
    of an LSTM.
    """
    leaves = tree_flatten(values)[0]
    return leaves if len(leaves) == count else [*_flat(values)]


def script_lines(frame: FrameType | None, *, exact: bool = False) -> list[str]:
    """Return the script's lines that a frame belongs to, the innermost first.

    Args:
        exact: after `#`, with the instruction: a line may have several calls.
    """
    lines: list[str] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, _OWN, "<frozen")):
            line = f"{Path(file).name}:{frame.f_lineno}"
            lines.append(f"{line}#{frame.f_lasti}" if exact else line)
        frame = frame.f_back
    return lines


def _line(frame: FrameType | None) -> str:
    return next(iter(script_lines(frame)), "")


class Recorder(TorchDispatchMode):
    """The operations of this thread since `clear`."""

    def __init__(self) -> None:
        super().__init__()
        self.records = self.is_paused = False
        self.clear()

    def clear(self) -> None:
        """Drop the recorded operations."""
        self.operations: list[Operation] = []
        self.failure: str | None = None
        self.escapes: list[tuple[int, Tensor, str]] = []
        self._created: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # tensors from outside, before a write
        self._bytes = 0

    def start(self) -> None:
        """Record from now on, unless another mode is at work, whose order must be kept."""
        if self.records or _modes():
            return
        self.clear()
        self.__enter__()
        self.records = True
        for name in ESCAPES:
            setattr(Tensor, name, self._noting(name))  # not operations, so no mode sees them

    def stop(self) -> None:
        """Stop recording."""
        if self.records and _modes()[-1:] == [self]:
            self.__exit__(None, None, None)
            self.records = False
            for name, original in _ORIGINALS.items():
                setattr(Tensor, name, original)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave out the observer's own operations."""
        is_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = is_paused

    def _noting(self, name: str) -> Any:
        original = _ORIGINALS[name]

        def leaving(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.records and not self.is_paused:
                where = _line(inspect.currentframe())
                self.escapes.append((len(self.operations), tensor, where))
            return original(tensor, *args, **kwargs)

        return leaving

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.failure is not None or self.is_paused:
            return func(*args, **kwargs)
        inputs = _flat((args, kwargs))
        if any(t.layout is not torch.strided or _is_wrapper(t) for t in inputs):
            self._fail(f"{func} computes with sparse tensors or with tensors of another class")
            return func(*args, **kwargs)
        written = list(_written(func, args, kwargs))
        for tensor in written:
            key = _storage(tensor)
            is_known = key in self._created or key in self.before
            if not is_known and tensor.numel() <= LARGEST_COPY:
                self.before[key] = (tensor, tensor.detach().clone())
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        random = torch.get_rng_state() if seeded else None
        outputs = func(*args, **kwargs)
        flat = _flat(outputs)
        known = {_storage(t) for t in inputs}
        for tensor in flat:
            key = _storage(tensor)
            if key not in known and key not in self._created:
                self._created.add(key)
                self._bytes += tensor.untyped_storage().nbytes()
        where = _line(inspect.currentframe())
        self.operations.append(Operation(func, args, kwargs, inputs, flat, written, random, where))
        if self._bytes > MOST_BYTES:
            self._fail(f"a micro-step has more than {MOST_BYTES >> 30} GiB of tensors")
        return outputs

    def _fail(self, why: str) -> None:
        self.clear()
        self.failure = why


def _is_wrapper(tensor: Tensor) -> bool:
    """Return whether a class of its own computes with a tensor, as with DTensors."""
    method = "__torch_dispatch__"
    return getattr(type(tensor), method, None) is not getattr(Tensor, method)


def _modes() -> list[Any]:
    stack: Any = python_dispatch
    return stack._get_current_dispatch_mode_stack()  # noqa: SLF001


_ORIGINALS: dict[str, Any] = {name: getattr(Tensor, name) for name in ESCAPES}


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes to."""
    schema = func._schema  # noqa: SLF001
    if not schema.is_mutable:
        return
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from _flat(value)


def _numbers(op: Operation) -> list[float]:
    """Return the plain numbers that an operation computes with."""
    if op.name not in ARITHMETIC:
        return []
    single = [t for t in op.inputs if not t.dim() and not t.requires_grad]
    numbers = [a for a in op.args if isinstance(a, int | float) and abs(a) not in (0, 1)]
    return [float(number) for number in (*numbers, *single)]


class Replay:
    """A recorded micro-step, ready to be run again with other data.

    Args:
        recorder: what it was recorded by.
        reductions: the operations that reduce the elements of each term of the loss.
        state: the identities of the model's tensors (weights and buffers), which are no data.
        rows: the number of samples; None: as most of the data have.
    """

    def __init__(
        self,
        recorder: Recorder,
        reductions: Sequence[Operation],
        state: set[int],
        rows: int | None,
    ) -> None:
        self.recorder, self.reductions = recorder, reductions
        last = max(map(recorder.operations.index, reductions))
        self.reduction = recorder.operations[last]
        self.operations = recorder.operations[:last]
        terms = [
            (number, t)
            for number, reduction in enumerate(reductions)
            for t in reduction.inputs
            if t.dim() and t.numel() > 1
        ]
        self.ends = [t for _, t in terms]
        self.terms = [number for number, _ in terms]  # the term of each end
        self.free: set[int] = set()  # terms that no sample has changed
        self.state = state
        self.produced: set[int] = set()
        for op in self.operations:  # an operation in place returns its argument
            self.produced |= {id(t) for t in op.outputs} - {id(t) for t in op.inputs}
        self.data = self._find_data()
        self.rows = rows if rows is not None else self.usual_rows()
        self.sources = self._find_sources()
        self.tainted = self._reached({_storage(t) for t in self.sources.values()})
        self.needed = self._need()
        self.steps = [
            op
            for op in self.operations
            if any(_storage(t) in self.tainted for t in (*op.inputs, *op.outputs))
            and any(_storage(t) in self.needed for t in (*op.outputs, *op.written))
        ]

    # ------------------------------------------------------------------
    # Data, and the values that depend on them.

    def _is_outside(self, tensor: Tensor) -> bool:
        return id(tensor) not in self.produced

    def _find_data(self) -> dict[int, Tensor]:
        """Return tensors from outside, random ones, and selections and arrangements of these."""
        data: dict[int, Tensor] = {}
        for op in (*self.operations, self.reduction):
            for t in op.inputs:
                if self._is_outside(t) and id(t) not in self.state and not t.requires_grad:
                    data[id(t)] = t
            # Random numbers are data, too: scripts try themselves on them.
            is_data = op.name in SELECTIONS if op.inputs else op.random is not None
            if is_data and all(id(t) in data for t in op.inputs):
                data.update((id(t), t) for t in op.outputs)
        return data

    def usual_rows(self) -> int:
        """Return the length of the data's first dimension where computation begins."""
        lengths: Counter[int] = Counter()
        for op in (*self.operations, self.reduction):
            if op.name not in SELECTIONS:
                used = {id(t): t for t in op.inputs if id(t) in self.data and t.dim()}
                lengths.update(t.shape[0] for t in used.values() if t.shape[0] > 1)
        return lengths.most_common(1)[0][0] if lengths else 1

    def _find_sources(self) -> dict[int, Tensor]:
        """Return the data that have a row a sample, where they first have."""
        sources: dict[int, Tensor] = {}
        derived: set[int] = set()
        for op in (*self.operations, self.reduction):
            for t in op.inputs:
                if id(t) in self.data and self._is_outside(t) and self._has_rows(t):
                    sources[id(t)] = t
                    derived.add(id(t))
            if any(id(t) in derived for t in op.inputs):
                derived.update(id(t) for t in op.outputs)
                continue
            for t in op.outputs:
                if id(t) in self.data and self._has_rows(t):
                    sources[id(t)] = t
                    derived.add(id(t))
        return sources

    def _has_rows(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] == self.rows

    def _reached(self, storages: set[int]) -> set[int]:
        """Return these storages, and those that depend on them."""
        reached = set(storages)
        for op in self.operations:
            if any(_storage(t) in reached for t in op.inputs):
                reached.update(_storage(t) for t in (*op.outputs, *op.written))
        return reached

    def _need(self) -> set[int]:
        """Return the storages that the loss's elements depend on."""
        needed = {_storage(t) for t in self.ends}
        for op in reversed(self.operations):
            if any(_storage(t) in needed for t in (*op.outputs, *op.written)):
                needed.update(_storage(t) for t in op.inputs)
        return needed

    def is_data(self, tensors: Sequence[Tensor]) -> bool | None:
        """Return whether the loss depends on these; None where it may by a way around torch."""
        if any(_storage(t) in self.needed for t in tensors):
            return True
        reached = self._reached({_storage(t) for t in tensors})
        left = [tensor for _, tensor, _ in self.recorder.escapes]
        left += [op.inputs[0] for op in self.operations if op.name == "_local_scalar_dense"]
        return None if any(_storage(t) in reached for t in left) else False

    def constants(self) -> list[str]:
        """Return the values that elements depend on besides data, weights and their results."""
        texts: set[str] = set()
        for op in (*self.steps, *self.reductions):
            for t in op.inputs:
                own = id(t) in self.sources or id(t) in self.state or t.requires_grad
                if own or not self._is_outside(t) or not t.is_floating_point():
                    continue
                if id(t) in self.data and op.name in SELECTIONS:
                    continue  # only the chosen part of it counts
                values = t.detach().reshape(-1)[:: max(1, t.numel() // 4096)].double()
                digest = hash(tuple(values.tolist())) & 0xFFFFFFFF
                texts.add(f"a tensor {list(t.shape)} in {op}#{digest:08x}")
            texts.update(f"a number in {op}#{number:.12g}" for number in _numbers(op))
        return sorted(texts)

    def escaped(self) -> str | None:
        """Return where a value left torch, if data from outside may have come from it."""
        left: list[tuple[int, str]] = []
        for position, tensor, where in self.recorder.escapes:
            # One from outside that no operation has used may hold samples as well.
            if _storage(tensor) in self.tainted or (tensor.dim() and self._is_outside(tensor)):
                left.append((position, where))
        for position, op in enumerate(self.operations):
            is_number = op.name == "_local_scalar_dense" and op.inputs[0].dtype is not torch.bool
            if is_number and _storage(op.inputs[0]) in self.tainted:
                left.append((position, op.where))
                value = float(op.inputs[0])
                known = {value, -value, 1 / value if value else 0.0}
                for used in self.steps:
                    if any(number in known for number in _numbers(used)):
                        return f"{used} computes with a number that comes from samples"
        if not left:
            return None
        first, where = min(left)
        used = {id(t) for op in self.operations[:first] for t in op.inputs}
        for op in (*self.operations[first:], self.reduction):
            for t in op.inputs:
                outside = self._is_outside(t) and id(t) in self.sources and id(t) not in used
                if outside and t.is_floating_point() and _storage(t) in self.needed:
                    return f"values of samples leave torch at {where}, and others come back"
        return None

    # ------------------------------------------------------------------
    # Running it again.

    def run(
        self,
        rows: Sequence[int] | None,
        kept: int | None = None,
        divisor: Tensor | None = None,
    ) -> tuple[list[Tensor], str]:
        """Return the reduced tensors where sample i has the data of sample `rows[i]`.

        Args:
            rows: None: as recorded.
            kept: a sample whose data are its own. The operation is returned that first gives
                another result for it, "" if none does.
            divisor: a tensor of one number that the reduced tensors are multiplied by, as it is
                with these data; it comes last among them.
        """
        index = torch.arange(self.rows) if rows is None else torch.tensor(rows)
        replaced = {
            key: t.detach().index_select(0, index.to(t.device)) for key, t in self.sources.items()
        }
        changed = {key: t for key, t in replaced.items() if self._is_outside(self.sources[key])}
        first = ""
        for op in self.steps:
            for t in op.written:
                if id(t) not in changed:
                    changed[id(t)] = self._before(op, t)
            if op.function.namespace in ("c10d", "_c10d_functional"):
                raise UntestableError(f"a collective within the loss ({op})")
            copied = "batch_norm" in op.name  # it writes to its statistics, and does not say so

            def current(value: Any, copied: bool = copied) -> Any:
                if not isinstance(value, Tensor):
                    return value
                tensor = changed.get(id(value), value)
                return tensor.clone() if copied else tensor

            if op.random is not None:
                torch.set_rng_state(op.random)
            try:
                outputs = _results(
                    op.function(*tree_map(current, op.args), **tree_map(current, op.kwargs)),
                    len(op.outputs),
                )
            except (RuntimeError, IndexError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise UntestableError(f"{op} does not take other data: {reason}") from error
            for old, new in zip(op.outputs, outputs, strict=True):
                if new is None:
                    continue
                changed[id(old)] = replaced.get(id(old), new)
                if (
                    kept is not None
                    and not first
                    and not op.name.startswith("empty")  # it holds anything
                    and self._has_rows(old)
                    and (new.shape != old.shape or _differs(old, new)[kept].any())
                ):
                    first = str(op)
        ends = [changed.get(id(t), t) for t in self.ends]
        if divisor is not None:
            number = changed.get(id(divisor), divisor)
            ends = [*(end * number for end in ends), number]
        return ends, first

    def own_sum(self) -> float | None:
        """Return a sum over the samples that all elements are divided by, such as that of their
        weights, where samples influence one another in no other way.

        Times the divisor, the elements are separable then; and the divisor is the sum of what it
        would be of each sample alone.
        """
        divisors = {
            id(op.args[1]): op.args[1]
            for op in self.steps
            if op.name in ("div", "div_")
            and isinstance(op.args[1], Tensor)
            and op.args[1].numel() == 1
            and _storage(op.args[1]) in self.tainted
        }
        if len(divisors) != 1:
            return None
        [divisor] = divisors.values()
        number = float(divisor)
        if not (math.isfinite(number) and number > 0) or _mixed(self, self.rows, divisor):
            return None
        shares: list[float] = []
        for sample in range(min(self.rows, MANY)):
            (*_, of_one), _ = self.run([sample] * self.rows, divisor=divisor)
            shares.append(float(of_one) / self.rows)
        for sample in range(len(shares) - 1):  # also tells a sum from a largest one
            rows = list(range(self.rows))
            rows[sample] = sample + 1
            (*_, replaced), _ = self.run(rows, divisor=divisor)
            expected = number - shares[sample] + shares[sample + 1]
            if abs(float(replaced) - expected) > 1e-5 * number:
                return None
        return number

    def _before(self, op: Operation, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor from outside as it was before the script wrote to it."""
        before = self.recorder.before.get(_storage(tensor))
        if before is None or before[0] is not tensor:
            raise UntestableError(f"{op} writes to a tensor from outside")
        return before[1].clone()


def _differs(tensor: Tensor, other: Tensor) -> Tensor:
    """Return where two tensors differ by more than rounding."""
    if not tensor.is_floating_point():
        return tensor != other
    tensor, other = tensor.detach().double(), other.detach().double()
    finite = tensor[tensor.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    near = (tensor - other).abs() <= SAME * largest
    return ~(near | (tensor == other) | (tensor.isnan() & other.isnan()))


@contextmanager
def _kept_random_state() -> Generator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def compare_samples(replay: Replay) -> tuple[str | None, str | None]:
    """Return how samples influence one another, and what could not be tested."""
    count = replay.rows
    if count < 2:
        return None, None  # one sample has no others
    with torch.no_grad(), _kept_random_state(), torch.autocast("cpu", enabled=False):
        try:
            return _mixed(replay, count), replay.escaped()
        except UntestableError as error:
            return None, str(error)


def _mixed(replay: Replay, count: int, divisor: Tensor | None = None) -> str | None:
    """Return how samples influence one another, None if they do not.

    Args:
        divisor: see `Replay.run`.
    """
    began = time.perf_counter()
    same, _ = replay.run(None, divisor=divisor)
    seconds = time.perf_counter() - began
    if divisor is not None:
        same.pop()
    elif any(_shape_or_values_differ(a, b) for a, b in zip(replay.ends, same, strict=True)):
        raise UntestableError("the same data give another loss when they are computed again")
    samples = MANY if seconds < QUICK_S else FEW
    chosen = sorted({i * count // min(samples, count) for i in range(min(samples, count))})
    owners = [torch.full(t.shape, -1) for t in same]
    reached: set[int] = set()
    changed: set[int] = set()
    for sample in chosen:
        rows = list(range(count))
        rows[sample] = (sample + 1) % count
        swapped, _ = replay.run(rows, divisor=divisor)
        alone, culprit = replay.run([sample] * count, kept=sample, divisor=divisor)
        results = zip(replay.terms, same, owners, swapped, alone, strict=divisor is None)
        for term, end, owner, a, b in results:
            if a.shape != end.shape or b.shape != end.shape:
                raise UntestableError(
                    f"the number of elements in {replay.reduction} depends on the data"
                )
            own = _differs(end, a)
            if bool((own & (owner >= 0)).any()) or bool((own & _differs(end, b)).any()):
                return (
                    "the loss of a sample depends on other samples of its micro-batch, by "
                    f"{culprit or replay.reduction}"
                )
            if bool(own.any()):
                reached.add(sample)
                changed.add(term)
            owner[own] = sample
    if len(reached) < 2:
        raise UntestableError(UNCHANGED)
    replay.free = {*range(len(replay.reductions))} - changed
    return None


def own_sum(replay: Replay) -> float | None:
    """Return `Replay.own_sum`; None where it cannot be computed."""
    with torch.no_grad(), _kept_random_state(), torch.autocast("cpu", enabled=False):
        try:
            return replay.own_sum()
        except UntestableError:
            return None


def _shape_or_values_differ(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape != other.shape or bool(_differs(tensor, other).any())


def find_reductions(recorder: Recorder, nodes: Sequence[Any]) -> list[Operation] | None:
    """Return the operations that made nodes of the autograd graph; None if one is not recorded."""
    by_node: dict[Any, Operation] = {}
    for op in recorder.operations:
        by_node.update((t.grad_fn, op) for t in op.outputs if t.grad_fn is not None)
    operations = [by_node.get(node) for node in nodes]
    known = [op for op in operations if op is not None]
    return known if len(known) == len(nodes) else None
