"""Assertions on messages: their class, and the keys and values that they name.

So a sentence can be rewritten. The areas of config and plan hold whole sentences in one table alone
(`MESSAGES`).
"""

import contextlib
import re

import pytest


@contextlib.contextmanager
def refused(error, names):
    """Expect an error of exactly this class.

    Args:
        names: keys, values and other words that its message names in this order, with blanks
            between them. A part of a longer word or of a longer key does not count.
    """
    with pytest.raises(error) as caught:
        yield caught
    assert caught.type is error
    assert mentions(str(caught.value), names), str(caught.value)


def mentions(text, names):
    """Return whether a warning, a cause or another sentence has these names, as in `refused`."""
    in_order = ".*?".join(map(_whole, names.split()))
    return re.search(in_order, text, re.DOTALL) is not None


def _whole(name):
    return rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w)"
