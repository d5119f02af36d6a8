"""The add-ons: what can be taken away, with the folder of that name here and its page."""

from dataclasses import dataclass

from tests.helpers import ROOT


@dataclass(frozen=True)
class AddOn:
    """How an add-on enters.

    Attributes:
        commands: its verbs.
        settings: words of a launch that need it.
        refused: the setting, as the refusal names it.
        page: below docs/.
    """

    commands: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    refused: str = ""
    page: str | None = None


ADD_ONS = {
    "audit": AddOn(commands=("audit",), page="how-to/audit.md"),
    "engine/mindspore": AddOn(
        settings=("job._target_=orchestrator.jobs.digits_mindspore.DigitsMindSpore",),
        refused="framework=mindspore",
        page="how-to/mindspore.md",
    ),
    "rehearse": AddOn(commands=("rehearse",), page="how-to/rehearse.md"),
    "replay": AddOn(
        commands=("replay", "bisect"),
        settings=("run.callbacks=[replay]",),
        refused="run.callbacks=replay",
        page="how-to/replay.md",
    ),
    "report_page": AddOn(commands=("report",), page="how-to/report.md"),
    "search": AddOn(
        settings=("-m", "sweep.search=tpe", "sweep.trials=2", "schedule.base_lr=interval(0.1,1)"),
        refused="sweep.search=tpe",
    ),
    "sentinel": AddOn(
        settings=("accumulation.sentinel_every=2", "accumulation.reduction=reproducible"),
        refused="accumulation.sentinel_every=2: run.callbacks=sentinel",
    ),
    "submitit_plugin": AddOn(),
    "testing": AddOn(),
    "trackers": AddOn(
        settings=("tracker=mlflow",), refused="tracker.kind=mlflow", page="how-to/trackers.md"
    ),
}
PRESENT = [
    name
    for name in ADD_ONS
    if (ROOT / "orchestrator" / name).exists() or (ROOT / "orchestrator" / f"{name}.py").exists()
]
ABSENT = [name for name in ADD_ONS if name not in PRESENT]
