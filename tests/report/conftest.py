import pytest

from tests.run_folders import Screen, maker, result


@pytest.fixture(autouse=True)
def neutral_environment(monkeypatch):
    """Remove variables about colours, which must not decide whether tests pass."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def screen():
    return Screen()


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
