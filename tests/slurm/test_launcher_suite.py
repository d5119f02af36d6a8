"""Hydra's own suite for launchers, run by ours on a real SLURM: each sweep is one array."""

import pytest
from hydra.test_utils.launcher_common_tests import LauncherTestSuite

from tests.sweep.hydra_state import as_in_a_new_process

__all__ = ["as_in_a_new_process"]  # a fixture for all tests here
pytestmark = pytest.mark.filterwarnings("ignore:Future Hydra versions:UserWarning")


class TestLauncherOnSlurm(LauncherTestSuite):
    @pytest.fixture
    def launcher_name(self) -> str:
        return "orchestrator"

    @pytest.fixture
    def overrides(self, slurm) -> list[str]:
        place = f"{{kind: slurm, slurm_conf: '{slurm.slurm_conf}', time_min: 5}}"
        return [f"hydra.launcher.cluster={place}"]
