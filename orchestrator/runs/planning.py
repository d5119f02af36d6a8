"""The plan of one run: each rank's work, and what the cluster would answer to a launch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from orchestrator.clusters.api import Request, cluster_of
from orchestrator.config.schema import Config
from orchestrator.errors import ClusterError
from orchestrator.plan.plan import Plan
from orchestrator.plan.program import ProgramPlan, notes_of_program
from orchestrator.plan.recorded_speeds import names_run
from orchestrator.report.run_tables import print_plan
from orchestrator.report.terminal import say
from orchestrator.runs.start import new_folder, prepare


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The effect that a launch of a run would have.

    Attributes:
        answer: the cluster's answer to the request; empty if it has none.
    """

    config: Config
    plan: dict[str, Any]
    request: Request
    answer: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        if not self.answer:
            return self.plan
        return {**self.plan, "request": {**self.request.details, **self.answer}}


def plan_new_run(config: Config) -> PlannedRun:
    """Return each rank's work in a new run, as a launch would have it. Raises `UsageError` as a
    launch does.
    """
    plan = with_notes(prepare(config), config)
    request, answer = ask_cluster(config)
    return PlannedRun(config=config, plan=plan, request=request, answer=answer)


def show_planned_run(planned: PlannedRun, console: Console) -> None:
    """Print the plan of a run as tables, and the cluster's answer."""
    print_plan(planned.plan, console)
    answer = planned.answer
    if answer and planned.request.text:
        sys.stdout.write(f"\n{planned.request.text}\n")
    if sentence := answer.get("scheduler"):
        is_local = planned.config.cluster.kind == "local"
        speaker = "a launch here" if is_local else "the scheduler"
        say(console, f"{speaker} would say: {sentence}", "red" if answer["refused"] else "")
    if warning := answer.get("warning"):
        say(console, f"warning: {warning}", "yellow", prose=True)


def with_notes(plan: Plan | ProgramPlan, config: Config) -> dict[str, Any]:
    """Return a plan as in plan.json, with `notes` about it."""
    if isinstance(plan, ProgramPlan):
        return {**plan.to_json(), "notes": notes_of_program(config)}
    notes = [cluster_of(config).survival_line]
    if names_run(balance := config.accumulation.balance):
        notes.append(f"work is dealt by the speeds that {balance} has recorded")
    return {**plan.to_json(), "notes": [*filter(None, notes)]}


def ask_cluster(config: Config) -> tuple[Request, dict[str, Any]]:
    """Return the request, and the cluster's answer to it; empty if it has none."""
    cluster = cluster_of(config)
    request = cluster.request(new_folder(config), 0)
    warning: str | None = None
    try:
        admission = cluster.check(request)
        answer, refused = admission.message, False
        warning = "; ".join(admission.warnings) or None
    except ClusterError as error:
        answer, refused = str(error), True
    if not (request.text or answer or warning):
        return request, {}
    return request, {"scheduler": answer, "refused": refused, "warning": warning}
