"""Hydra's own suite for launchers, run by ours: points that are any function's, here."""

import pytest
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.test_utils.launcher_common_tests import LauncherTestSuite
from hydra.version import VersionBase

# The suite's own configurations state no version_base, and Hydra warns of what that means.
pytestmark = [
    pytest.mark.whole_runs,
    pytest.mark.hydra,
    pytest.mark.filterwarnings("ignore:Future Hydra versions:UserWarning"),
]


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    """No version of Hydra's behaviour is chosen yet, as our own composing does for good."""
    Plugins.instance()  # stores its plug-ins' configurations once, at their first import
    before, state = Singleton.get_state(), Singleton.get_state()
    state["instances"].pop(VersionBase, None)
    Singleton.set_state(state)
    yield
    Singleton.set_state(before)


@pytest.mark.parametrize(("launcher_name", "overrides"), [("orchestrator", [])])
class TestLauncher(LauncherTestSuite):
    pass
