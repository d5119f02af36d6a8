"""What tests of several files compare with, and is made once for all workers of one run of them."""

import fcntl
import json
import os
from pathlib import Path

SHARED = "TESTS_MADE_ONCE"
"""Where `tests.gate` keeps such values, for all the pytests that it starts."""


def once(tmp_path_factory, name, make):
    """The value of `make()`, of plain types: made by whoever asks first, while others wait."""
    folder = tmp_path_factory.getbasetemp()
    if folder.name.startswith("popen-"):  # a worker's own, in the run's
        folder = folder.parent
    folder = Path(os.environ.get(SHARED, folder))
    path = folder / f"{name}.json"
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if text := file.read():
            return json.loads(text)
        value = make()
        file.write(json.dumps(value))
        return value
