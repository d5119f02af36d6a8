"""What cannot be installed cannot be tested: there is no MindSpore for Python 3.13 yet."""

import sys

WITHOUT = sys.version_info >= (3, 13)
collect_ignore_glob = ["*/engine/mindspore/*", "tests/slurm/test_mindspore.py"] if WITHOUT else []
