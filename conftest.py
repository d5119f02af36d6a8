"""Settings and fixtures of all tests.

Hypothesis has no deadlines and does not check its speed: how long an example takes on a shared
machine proves nothing, and on a fresh one it first writes its tables of Unicode.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import helpers
from tests.full_disk import Disk
from tests.phases import PHASES, is_of_phase

ROOT = Path(__file__).parent
NO_MINDSPORE = sys.version_info >= (3, 13)  # there is no build for Python 3.13 yet
collect_ignore_glob = (
    ["*/engine/mindspore/*", "tests/slurm/test_mindspore.py"] if NO_MINDSPORE else []
)

settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--phase", choices=PHASES, help="only tests of this phase: tests/phases.py")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist would begin with the files of the most tests
    # `nohup` ignores SIGHUP, a shell's background job SIGINT, and the commands under test would
    # inherit that.
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules of other phases, and those without tests and examples: each worker would
    import them at its start.
    """
    path, phase = collection_path, config.getoption("--phase")
    if path.suffix != ".py" or ROOT not in path.parents:
        return None
    if phase is not None and not is_of_phase(path, phase):
        return True
    if path.name.startswith("test_"):
        return None
    return True if ">>> " not in path.read_text("utf-8") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def _end_what_it_starts() -> Iterator[None]:
    before = len(helpers.STARTED)
    yield
    helpers.end_started(before)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Return a new run, whose folder has no files yet."""
    from orchestrator.rundir.folder import RunDir

    run = RunDir(tmp_path / "run")
    run.create()
    return run


@pytest.fixture
def begun(run: Any) -> Any:
    """Return a new run whose first attempt has begun."""
    run.begin_attempt()
    return run


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes a run's folder below `tmp_path`."""
    from tests.run_folders import maker  # with what composes configurations

    return maker(tmp_path)


@pytest.fixture(autouse=True)
def _torch_as_before() -> Iterator[None]:
    """Compute on one thread, as ranks do here: kernels split over two may round differently.

    Restore what an engine sets for good. Only where a test's module has imported torch.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)
    torch.utils.deterministic.fill_uninitialized_memory = filling


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    """Give back the stop signals' handlers: programs under test keep theirs to the end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# Both set up before all other fixtures of their scope, so they end what those start, too.
_of_a_test = pytest.fixture(autouse=True)(_end_what_it_starts)
_of_a_module = pytest.fixture(autouse=True, scope="module")(_end_what_it_starts)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A small file system of the test's own, to fill."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system to fill")
    disk = Disk(tmp_path / "disk")
    yield disk
    subprocess.run(["umount", "-l", disk.folder], check=True, capture_output=True)
