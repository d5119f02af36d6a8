"""Checks at the start: whether all ranks have the same data and rates, and facts are true."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
import platform
import random
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from statistics import median
from typing import Any

from orchestrator.config.rules import OFF, planned_survival, refuse_schedule, with_survival
from orchestrator.config.schema import ClusterConfig, Config, FactsConfig, ScheduleConfig, gpu_count
from orchestrator.engine.api import Engine, Group, against
from orchestrator.engine.common.replicas import minority_ranks
from orchestrator.errors import ConfigError, JobError
from orchestrator.job import has_own_rate
from orchestrator.plan.plan import Plan
from orchestrator.plan.plan_warnings import named_ranks
from orchestrator.rundir.warnings import warn

_BITS = 48  # a float64 carries them exactly
_DEEPEST = 8


def digests_of(value: Any) -> tuple[int, int]:
    """Return two numbers of 48 bits, of its structure (types, keys, shapes) and its contents.

    Numbers, text, bytes, tensors, arrays, mappings, sequences, and objects by their fields are
    looked into; of anything else the type counts alone.

    >>> same = digests_of({"x": [1, 2.0]}), digests_of({"x": [1, 2.0]})
    >>> same[0] == same[1], digests_of([1])[0] == digests_of([2])[0]
    (True, True)
    >>> digests_of([1])[1] == digests_of([2])[1]
    False
    """
    structure, contents = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    for what, data in _parts(value, 0):
        structure.update(f"{what};{len(data)};".encode())
        contents.update(data)
    return _number(structure.digest()), _number(contents.digest())


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little") >> (64 - _BITS)


def _parts(value: Any, depth: int) -> Iterator[tuple[str, bytes]]:
    """Yield the parts of a value in order, as (kind, bytes)."""
    kind = type(value).__name__
    if isinstance(value, bytes | bytearray | memoryview):
        yield kind, bytes(value)
    elif isinstance(value, str):
        yield kind, value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bool | int | float | complex) or value is None:
        yield kind, repr(value).encode().ljust(32)
    elif (array := _as_array(value)) is not None:
        yield f"{kind} {array.dtype} {array.shape}", array.tobytes()
    elif depth < _DEEPEST:
        inner = list(_within(value))
        yield f"{kind} of {len(inner)}", b""
        for name, one in inner:
            yield name, b""
            yield from _parts(one, depth + 1)
    else:
        yield kind, b""


def _within(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), one) for key, one in value.items())
    elif isinstance(value, AbstractSet):
        yield from (("", one) for one in sorted(value, key=repr))
    elif isinstance(value, list | tuple):
        yield from (("", one) for one in value)
    elif is_dataclass(value):
        yield from ((field.name, getattr(value, field.name)) for field in fields(value))
    else:
        yield from sorted(getattr(value, "__dict__", {}).items())


def _as_array(value: Any) -> Any:
    """Return the numbers of a tensor, array or picture; None for any other value."""
    import numpy as np

    torch: Any = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor):
        dense: Any = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        # NumPy has no bfloat16, nor conjugates that are still to be taken.
        dense = dense.float() if dense.dtype == torch.bfloat16 else dense.resolve_conj()
        value = dense.resolve_neg().cpu().numpy()
    elif hasattr(value, "asnumpy"):  # MindSpore's
        value = value.asnumpy()
    if not (hasattr(value, "__array__") or hasattr(value, "__array_interface__")):
        return None
    array = np.asarray(value)
    return None if array.dtype.hasobject else np.ascontiguousarray(array)


# ----------------------------------------------------------------------
# The data set must be the same on every rank, since each derives the same order from it.

_PLACES = 8  # of samples that are looked at
_SEED = 20_240_229


def agreed_samples(engine: Engine, dataset: Any) -> int:
    """Return the number of samples, once all ranks agree on it and on some samples. Collective.

    Samples that a rank cannot read twice alike, since the data set draws numbers that no seed
    reaches, are not compared, but warned of.

    Raises:
        JobError: `dataset` has no length; or on all ranks alike, naming those whose data set has
            another length or other samples than most.
    """
    try:
        samples = len(dataset)
    except TypeError:
        raise JobError(
            f"dataset() must give something with len() and [index], but gives a "
            f"{type(dataset).__name__} without len()"
        ) from None
    _agree_on_length(engine, samples)
    places = _places_of(samples)
    rows = engine.gather(_looked_at(dataset, places))
    if minority_ranks(rows):
        _refuse_other_samples(engine, dataset, places, rows)
    return samples


def _agree_on_length(engine: Engine, samples: int) -> None:
    counts = [int(row[0]) for row in engine.gather([float(samples)])]
    most = max(counts, key=lambda count: (Counter(counts)[count], count == counts[0]))
    odd = [f"{count} on rank {rank}" for rank, count in enumerate(counts) if count != most]
    if odd:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        raise JobError(
            f"dataset() has {most} samples on most ranks, but {', '.join(odd[:3])}{more}; every "
            "rank needs the whole data set, of which the plan gives it its part"
        )


def _places_of(samples: int) -> list[int]:
    """Return the samples to compare: the first two, and others up to the last.

    >>> _places_of(100), _places_of(3), _places_of(0)
    ([0, 1, 16, 33, 49, 66, 82, 99], [0, 1, 2], [])
    """
    if not samples:
        return []
    spread = {number * (samples - 1) // (_PLACES - 2) for number in range(_PLACES - 1)}
    return sorted(spread | {min(1, samples - 1)})


def _looked_at(dataset: Any, places: Sequence[int]) -> list[float]:
    """Return for each place the two digests of its sample."""
    found: list[float] = []
    with _generators_as_before():
        for place in places:
            _seed(place)
            found += map(float, digests_of(dataset[place]))
    return found


@contextmanager
def _generators_as_before() -> Generator[None]:
    import numpy as np

    torch: Any = sys.modules.get("torch")
    python, numpys = random.getstate(), np.random.get_state()
    torchs = torch.default_generator.get_state() if torch else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
        if torch:
            torch.default_generator.set_state(torchs)


def _seed(place: int) -> None:
    """Seed all generators, so that samples with random augmentation are equal on all ranks."""
    import numpy as np

    random.seed(_SEED + place)
    np.random.seed(_SEED + place)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(_SEED + place)


def _refuse_other_samples(
    engine: Engine, dataset: Any, places: Sequence[int], rows: Sequence[Sequence[float]]
) -> None:
    """Raise, unless a second look finds that samples are never the same. Collective."""
    again = engine.gather(_looked_at(dataset, places))
    if any(list(one) != list(two) for one, two in zip(rows, again, strict=True)):
        warn(
            "dataset() gives another sample whenever it is asked for the same one, by random "
            "numbers that no seed reaches: whether ranks have the same data cannot be told, and a "
            "resumed run will not have the bits of an undisturbed one. Draw from random, "
            "numpy.random or torch's default generator, and set augments = True"
        )
        return
    odd = minority_ranks(rows)
    column = next(n for n, seen in enumerate(zip(*rows, strict=True)) if len(set(seen)) > 1)
    what = ("another type or shape", "other values")[column % 2]
    whose = "rank 0" if len(rows) == 2 else "most ranks"
    raise JobError(
        f"dataset() is not the same on all ranks: on {named_ranks(odd)} sample "
        f"{places[column // 2]} has {what} than on {whose}; every rank needs the whole data set, "
        "in the same order, of which the plan gives it its part"
    )


# ----------------------------------------------------------------------
# A job's own learning rates: `learning_rate(update)` in the place of the configuration's schedule.

Rates = Callable[[int], float]


def own_rates(job: Any, schedule: ScheduleConfig, engine: Engine, updates: int) -> Rates | None:
    """Return the job's own rates, if it has any. Collective in that case.

    Raises:
        ConfigError: a schedule is configured as well.
        JobError: it gives no rates, or others when it is asked again, or on other ranks.
    """
    if not has_own_rate(job):
        return None
    refuse_schedule(type(job).__name__, schedule)
    named = f"{type(job).__name__}.learning_rate"

    def rates(update: int) -> float:
        return _rate(job.learning_rate(update), named, update)

    asked = sorted({0, 1 % updates, updates // 2, updates - 1})
    first = [rates(update) for update in asked]
    again = [rates(update) for update in reversed(asked)][::-1]
    for update, one, two in zip(asked, first, again, strict=True):
        if one != two:
            raise JobError(
                f"{named}({update}) gives {one:g}, then {two:g}: it must depend on the update's "
                "number alone, so that a resumed run has the rates of an undisturbed one"
            )
    rows = engine.gather(first)
    if odd := minority_ranks(rows):
        raise JobError(
            f"{named}(update) gives other rates on {named_ranks(odd)}; it must be the same on all"
        )
    return rates


def _rate(found: Any, named: str, update: int) -> float:
    try:
        rate = float(found)
    except (TypeError, ValueError, RuntimeError):
        rate = math.nan
    if not (math.isfinite(rate) and rate >= 0):
        raise JobError(f"{named}({update}) must give a number, 0 or more, but gives {found!r:.60}")
    return rate


# ----------------------------------------------------------------------
# Comparison of `facts.*`, given before job and data were loaded, with what they are.

_FIGURES = {"parameters", "dataset_samples", "bytes_on_wire_per_update", "schedule", "warnings"}
"""Figures of a plan that decide nothing; the schedule is compared by its rates."""

_SEEN, _APART = 5, 2.0  # updates; how many times as long or as short


def compare_facts(
    facts: FactsConfig, planned: Plan, plan_with: Callable[[int | None, int | None], Plan]
) -> None:
    """Compare `facts` with the true plan. Not collective; the same on all ranks.

    Args:
        planned: the true plan.
        plan_with: gives the plan for a number of parameters and of samples.

    Raises:
        ConfigError: the plan would be another one.
    """
    true_plan = planned.figures()
    wrong = {
        name: (said, true_plan[name])
        for name in ("parameters", "dataset_samples")
        if (said := getattr(facts, name)) is not None and said != true_plan[name]
    }
    if not wrong:
        return
    shown = plan_with(
        facts.parameters or planned.traffic.parameters,
        facts.dataset_samples or planned.length.dataset_samples,
    ).figures()
    differences = "; ".join(
        f"facts.{name}={said}, but {'the model' if name == 'parameters' else 'the data set'} has "
        f"{true}"
        for name, (said, true) in wrong.items()
    )
    remedy = " ".join(f"facts.{name}={true}" for name, (_, true) in wrong.items())
    changed = [
        f"{name} {_short(shown[name])}, not {_short(true)}"
        for name, true in true_plan.items()
        if name not in _FIGURES and shown[name] != true
    ]
    if changed:
        raise ConfigError(
            f"{differences}. The plan that was checked had {', '.join(changed)}; set {remedy}, "
            "or leave facts out"
        )
    warn(f"{differences}; the plan is the same but for the bytes on the wire. Set {remedy}")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


class UpdateTime:
    """Compares `facts.update_s` with the first updates of an attempt, once.

    Args:
        said: the fact, if any.
    """

    def __init__(self, said: float | None) -> None:
        self._said, self._seen = said, list[float]()

    def see(self, update_s: float) -> None:
        """Note the seconds of an update."""
        if self._said is None:
            return
        self._seen.append(update_s)
        if len(self._seen) <= _SEEN:
            return
        said, self._said = self._said, None
        took = median(self._seen[1:])  # the first one warms up
        if not said / _APART <= took <= said * _APART:
            warn(
                f"facts.update_s={said:g}, but an update takes {took:.3g} s here (the median of "
                f"{_SEEN}): what was said of signals and time limits was meant for the other"
            )


# ----------------------------------------------------------------------
# Whether losses are survived, decided when group and job exist.


def agreed_survival(config: Config, job: Any, group: Group) -> Config:
    """Return `config` with `run.survive` true or false, the same on all ranks."""
    on = planned_survival(config).on
    if config.run.survive is None and on:
        refusal = against(job, group)
        if refusal and group.rank == 0:
            warn(f"{OFF}{refusal}")
        on = not refusal
    return with_survival(config, on=on and group.size > 1)


# ----------------------------------------------------------------------
# Requested accelerators: with them `transport=auto` must not silently compute on CPUs.

OPTIONS = ("gpus", "gpus-per-task", "gpus-per-socket", "gres")
HANDED_OUT = (
    "CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES",
)  # fmt: skip
NONE = frozenset({"", "-1", "nodevfiles", "none", "void"})
RESOURCES_OF_HOSTS = ("none", "tmp", "disk", "ssd", "nvme", "license", "bandwidth", "network")


def devices_asked(cluster: ClusterConfig, env: Mapping[str, str], *, scheduled: bool) -> str:
    """Return the setting that requests devices; "" without one.

    >>> devices_asked(ClusterConfig(gpus_per_node="a100:4"), {}, scheduled=True)
    'cluster.gpus_per_node=a100:4'
    """
    if gpu_count(cluster.gpus_per_node):
        return f"cluster.gpus_per_node={cluster.gpus_per_node}"
    for section in ("slurm_flags", "srun_flags"):
        flags: Mapping[str, object] = getattr(cluster, section)
        for name in OPTIONS:
            value = str(flags.get(name) or "")
            if value and not value.startswith(RESOURCES_OF_HOSTS):
                return f"cluster.{section}.{name}={value}"
    # With whole nodes SLURM hands out all that is in them, asked for or not.
    for name in HANDED_OUT if scheduled and not cluster.exclusive else ():
        if env.get(name, "").strip().lower() not in NONE:
            return f"the scheduler gave {name}={env[name]}"
    return ""


# ----------------------------------------------------------------------
# What ran: versions, machine and the state of the code, for environment.json.

PACKAGES = ("hydra-core", "omegaconf", "submitit", "numpy", "safetensors", "torch", "mindspore")


def describe_environment(
    framework_versions: Mapping[str, str], transport: str, code: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe code, packages and machine, without environment variables, which may be secret.

    Args:
        code: the `code_state` of what runs.
    """
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": versions,
        "framework": dict(framework_versions),
        "transport": transport,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "git": dict(code),
    }
