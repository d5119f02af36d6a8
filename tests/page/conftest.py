"""Run folders as runs leave them, without training."""

import json

import pytest

from orchestrator.compose.composer import compose
from orchestrator.config.reading import to_yaml
from orchestrator.plan.parts import Known
from orchestrator.plan.plan import Plan
from orchestrator.run_folder.rundir import SEALED, RunDir
from tests.report.conftest import record, result


def maker(home):
    """Makes a run's folder; `records` and `ended` in place of five updates that went well."""

    def make(name, *overrides, records=None, ended=None, **more):
        folder = home / name
        config = compose([*overrides, f"run.dir={folder}"])
        run = RunDir(folder)
        run.create()
        run.write_config(to_yaml(config))
        run.write_own(run.plan, Plan.of(config, Known(dataset_samples=1437)).to_json())
        told = {"overrides": list(overrides), "folder": str(home), SEALED: True, **more}
        run.write_own(run.submission, told)
        lines = [record(n) for n in range(5)] if records is None else records
        lines += [{"update": 4, "attempt": 0, "time": 1005.0, "evaluation": {"accuracy": 0.9}}]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if ended is not False:
            run.write_own(run.result, result() if ended is None else ended)
        run.begin_attempt()
        return run

    return make


@pytest.fixture
def made(tmp_path):
    return maker(tmp_path)


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """Three points, of which one failed. To be read only."""
    home = tmp_path_factory.mktemp("page")
    made = maker(home)
    culprit = {"rank": 2, "node": "node1", "cause": "ValueError: <b>bold</b>", "log_tail": []}
    made("sweep/0", "accumulation.steps=1")
    made("sweep/1", "accumulation.steps=2")
    made("sweep/10", "accumulation.steps=4", ended=result(state="failed", culprit=culprit))
    return home / "sweep"
