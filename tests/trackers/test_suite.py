"""MLflow and Weights & Biases pass the suite of trackers, an add-on of its own."""

import pytest

from tests.trackers.readers import mlflow_scalars, wandb_scalars

pytestmark = pytest.mark.whole_runs
TrackerSuite = pytest.importorskip("orchestrator.testing").TrackerSuite


class TestMLflow(TrackerSuite):
    @pytest.fixture
    def tracker(self):
        return ["tracker=mlflow"]

    def read(self, run):
        return mlflow_scalars(run)


class TestWandB(TrackerSuite):
    @pytest.fixture
    def tracker(self):
        return ["tracker=wandb"]

    def read(self, run):
        return wandb_scalars(run)
