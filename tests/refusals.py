"""What tests assert of a refusal: its class, and the keys and values that its message names.

So a sentence can be rewritten. Each area holds whole sentences in one table alone (`MESSAGES`).
"""

import contextlib
import re

import pytest


@contextlib.contextmanager
def refused(error, names):
    """Expect an error of exactly this class.

    Args:
        names: keys, values and other words that its message names, with blanks between them. A part
            of a longer word or of a longer key does not count.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert caught.type is error
    missing = [name for name in names.split() if not re.search(_whole(name), str(caught.value))]
    assert not missing, str(caught.value)


def _whole(name):
    return rf"(?<![\w.]){re.escape(name)}(?!\w)"
