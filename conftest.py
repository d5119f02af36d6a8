"""What cannot be installed cannot be tested: there is no MindSpore for Python 3.13 yet.

And how long an example takes says nothing about a law: machines are shared, so none has a deadline.
"""

import sys

from hypothesis import settings

WITHOUT = sys.version_info >= (3, 13)
collect_ignore_glob = ["*/engine/mindspore/*", "tests/slurm/test_mindspore.py"] if WITHOUT else []

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
