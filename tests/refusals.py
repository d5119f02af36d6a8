"""What tests assert of a refusal: its class, and the keys and values that its message names.

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
    in_order = ".*?".join(map(_whole, names.split()))
    assert re.search(in_order, str(caught.value), re.DOTALL), str(caught.value)


def _whole(name):
    return rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w)"
