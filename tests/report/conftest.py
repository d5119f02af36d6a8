import pytest

from tests.run_folders import Screen


@pytest.fixture(autouse=True)
def neutral_environment(monkeypatch):
    """Remove variables about colours, which must not decide whether tests pass."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def screen():
    return Screen()
