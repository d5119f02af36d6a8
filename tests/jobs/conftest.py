import pytest


@pytest.fixture
def run(tmp_path):
    """Return the folder of a run that a command will make."""
    return tmp_path / "run"
