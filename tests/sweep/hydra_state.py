"""What Hydra's suites expect of the process that they run in."""

import pytest
from hydra.core.singleton import Singleton
from hydra.version import VersionBase


@pytest.fixture(autouse=True)
def as_in_a_new_process():
    """No version of Hydra's behaviour is chosen yet, as our own composing does for good."""
    before, state = Singleton.get_state(), Singleton.get_state()
    state["instances"].pop(VersionBase, None)
    Singleton.set_state(state)
    yield
    Singleton.set_state(before)
