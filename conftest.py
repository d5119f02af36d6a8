"""What cannot be installed cannot be tested: there is no MindSpore for Python 3.13 yet.

How long an example takes says nothing about a law: machines are shared, so none has a deadline.
And workers begin with what takes longest (`tests/order.py`).
"""

import sys

import pytest
from hypothesis import settings

from tests.order import place_of

WITHOUT = sys.version_info >= (3, 13)
collect_ignore_glob = ["*/engine/mindspore/*", "tests/slurm/test_mindspore.py"] if WITHOUT else []

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # xdist would begin with the files of the most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of(item.nodeid))
