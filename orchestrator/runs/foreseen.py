"""What a launch would do, with nothing written and nothing started: `plan`."""

from __future__ import annotations

from typing import Any

from orchestrator.clusters.api import Request, cluster_of
from orchestrator.config.frameworks import notes
from orchestrator.config.job_source import check_target
from orchestrator.config.rules import planned_survival
from orchestrator.config.schema import Config
from orchestrator.errors import ClusterError
from orchestrator.plan.plan import Plan
from orchestrator.plan.program import ProgramPlan, notes_of_program
from orchestrator.runs.new_folder import new_folder
from orchestrator.runs.start import prepare


def plan_and_notes(config: Config) -> dict[str, Any]:
    """The plan as plan.json has it, and under `notes` what is to be said of it. Raises
    `UsageError`.
    """
    return with_notes(prepare(config), config)


def with_notes(plan: Plan | ProgramPlan, config: Config) -> dict[str, Any]:
    """As `plan_and_notes`, of a plan that is made already."""
    if isinstance(plan, ProgramPlan):
        return {**plan.to_json(), "notes": notes_of_program(config)}
    found = [*notes(config, check_target(config.job).framework), planned_survival(config).words]
    return {**plan.to_json(), "notes": [*filter(None, found)]}


def describe(config: Config) -> tuple[Request, dict[str, Any]]:
    """What would be handed over, and what the cluster says of it; empty where it says nothing."""
    cluster = cluster_of(config)
    request = cluster.request(new_folder(config), 0)
    warning: str | None = None
    try:
        admission = cluster.check(request)
        answer, refused = admission.words, False
        warning = "; ".join(admission.warnings) or None
    except ClusterError as error:
        answer, refused = str(error), True
    if not (request.text or answer or warning):
        return request, {}
    return request, {"scheduler": answer, "refused": refused, "warning": warning}
