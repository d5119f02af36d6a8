"""Plans for tests: of values by their own names, each at its place in a configuration."""

from dataclasses import fields

from orchestrator.config.schema import Config
from orchestrator.plan.parts import JobFacts
from orchestrator.plan.plan import Plan

KNOWN = [field.name for field in fields(JobFacts)]


def make_plan(**values) -> Plan:
    """`Plan.of` a configuration with these values and no checks of its own."""
    known = JobFacts(**{name: values.pop(name) for name in KNOWN if name in values})
    config = Config()
    for section in ("cluster", "accumulation", "schedule", "train", "engine"):
        kind = type(getattr(config, section))
        given = {f.name: values.pop(f.name) for f in fields(kind) if f.name in values}
        setattr(config, section, kind(**given))
    assert not values
    return Plan.of(config, known)
