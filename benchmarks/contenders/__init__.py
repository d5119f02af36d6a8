"""The compared frameworks, by name. A contender whose package is not installed says so."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.contenders.base import Contender, Setting
from benchmarks.contenders.frameworks import Fabric, HuggingFaceAccelerate
from benchmarks.contenders.ours import Ours, OursReproducible, OursSharded
from benchmarks.contenders.torch_own import DdpChecked, DdpNoSync, DdpPlain, Fsdp2

__all__ = ["ALL", "BY_NAME", "Contender", "Setting", "missing"]

_KINDS: tuple[type[Contender], ...] = (
    Ours,
    OursReproducible,
    OursSharded,
    DdpNoSync,
    DdpPlain,
    HuggingFaceAccelerate,
    Fabric,
    Fsdp2,
)
ALL = {kind.name: kind for kind in _KINDS}
BY_NAME: dict[str, type[Contender]] = {**ALL, DdpChecked.name: DdpChecked}
"""Those of `pairs`, too."""


def missing(name: str) -> str | None:
    """Return why the contender cannot take part here; None if it can."""
    package = ALL[name].needs
    if package is None or find_spec(package) is not None:
        return None
    return (
        f"{package.replace('_', '-')} is not installed (pip install -c constraints.txt '.[bench]')"
    )
