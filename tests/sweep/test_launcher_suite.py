"""Hydra's own suite for launchers, run by ours: points that are any function's, here."""

import pytest
from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)

from tests.sweep.hydra_state import as_in_a_new_process

OURS = "orchestrator"
# The suite's own configurations state no version_base, and Hydra warns of what that means.
__all__ = ["as_in_a_new_process"]  # a fixture for all tests here
pytestmark = pytest.mark.filterwarnings("ignore:Future Hydra versions:UserWarning")


@pytest.mark.parametrize(("launcher_name", "overrides"), [(OURS, [])])
class TestLauncher(LauncherTestSuite):
    pass


@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [(OURS, ["hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"])],
)
class TestLauncherInBatches(BatchedSweeperTestSuite):
    pass


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [({"defaults": [{"override hydra/launcher": OURS}]}, ["-m"])],
)
class TestLauncherOfAnApplication(IntegrationTestSuite):
    pass
