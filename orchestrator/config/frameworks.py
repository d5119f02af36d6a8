"""Facts about a job's framework that submitting needs, without importing the framework."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from orchestrator.config.schema import Config, node_range, value_of
from orchestrator.plugins import FRAMEWORK_FACTS

SURVIVE = "run.survive=true is not available with"
RESTARTS = "run.max_restarts=3"


class Limit(NamedTuple):
    """The values of a key that an engine supports.

    Attributes:
        supported: the first one is what a refusal suggests.
        condition: another key and its values that the limit is for; always, if None.
    """

    key: str
    supported: tuple[Any, ...]
    condition: tuple[str, tuple[Any, ...]] | None = None
    why: str = ""

    def refusal(self, config: Config, framework: str) -> str | None:
        """Return a sentence about a value that is not supported."""
        value, other = _setting(config, self.key), framework
        if self.condition is not None:
            known_by, values = self.condition
            if (setting := _setting(config, known_by)) not in values:
                return None
            other = f"{known_by}={_spelled(setting)}"
        if value in self.supported:
            return None
        why = self.why and f": {self.why}"
        return (
            f"{self.key}={_spelled(value)} is not available with {other}{why}; "
            f"try {self.key}={_spelled(self.supported[0])}"
        )


def _setting(config: Config, key: str) -> Any:
    if key == "optimizer":
        return config.optimizer.get("name") or config.optimizer.get("_target_")
    value = value_of(config, key)
    return node_range(value)[1] if key == "cluster.nodes" else value


def _spelled(value: Any) -> str:
    """Spell a value as on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


class FrameworkFacts:
    """Facts about a framework; those of a framework without a subclass of its own.

    A third party's subclass is found through the entry points `orchestrator.framework_facts`, by
    the name of its framework. Its module is imported where runs are planned: it must import neither
    the framework nor an engine.

    Args:
        name: of the framework.

    Attributes:
        limits: on the values of keys.
        cpu_transport: the transport that messages suggest where GPUs are too few.
        sends_early: buckets of the gradient leave during the last backward.
        package, tested_version: its distribution, and the version that was tested, for `doctor`.
    """

    limits: ClassVar[tuple[Limit, ...]] = ()
    cpu_transport: ClassVar[str] = "gloo"
    sends_early: ClassVar[bool] = True
    package: ClassVar[str] = ""
    tested_version: ClassVar[str] = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def problems(self, config: Config, *, coupled: bool) -> Iterator[str]:
        """Yield a sentence for each setting that its engine cannot honour.

        Args:
            coupled: the job's loss is one of all embeddings (`embed`, `loss_of_embeddings`).
        """
        del coupled
        yield from filter(None, (limit.refusal(config, self.name) for limit in self.limits))
        if config.run.survive:
            yield from self.survival_problems(config)

    def survival_problems(self, config: Config, *, talks: bool = False) -> Iterator[str]:
        """Yield why its ranks cannot continue without a lost one.

        Args:
            talks: the job's loss calls collectives.
        """
        del config, talks
        yield f"{SURVIVE} {self.name}; try {RESTARTS}"


@functools.cache  # a search of the installed packages takes 5 ms
def facts_of(framework: str | None) -> FrameworkFacts:
    """Return the facts of a framework; the defaults if it declares none, or is not known (None).

    Raises `ConfigError` if its package cannot provide them.
    """
    if framework is None:
        return FrameworkFacts("")
    if framework in FRAMEWORK_FACTS.ours or framework in FRAMEWORK_FACTS.names():
        return FRAMEWORK_FACTS.make(framework, FrameworkFacts, framework)
    return FrameworkFacts(framework)
