"""What cannot be installed cannot be tested: there is no MindSpore for Python 3.13 yet.

How long an example takes says nothing about a law: machines are shared, so none has a deadline.
And workers begin with what takes longest (`tests/order.py`).
"""

import sys
from typing import Any

import pytest
from hypothesis import settings

from tests.order import place_of, unit_of

WITHOUT = sys.version_info >= (3, 13)
collect_ignore_glob = ["*/engine/mindspore/*", "tests/slurm/test_mindspore.py"] if WITHOUT else []

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but in our order, and with tests/slurm on two workers."""
    from xdist.scheduler import LoadScopeScheduling

    class Units(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # that would begin with the most tests
    return Units(config, log)
