"""What configuration files may compute with: OmegaConf has no arithmetic of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from omegaconf import OmegaConf


def dense_parameters(layers: Sequence[int]) -> int:
    """Numbers in the weights and biases of dense layers of these sizes.

    >>> dense_parameters([2, 3, 1])
    13
    """
    return sum(a * b + b for a, b in itertools.pairwise(layers))


def transformer_parameters(width: int, layers: int, context: int, tokens: int = 256) -> int:
    """Numbers in a transformer with biases, tied embeddings and learned places.

    >>> transformer_parameters(64, 2, 128)
    124672
    """
    return width * (tokens + context + 2) + layers * (12 * width**2 + 13 * width)


def sum_of(*numbers: int) -> int:
    """The sum.

    >>> sum_of(1, 2, 4)
    7
    """
    return sum(numbers)


def when_null(value: Any, then: Any, otherwise: Any) -> Any:
    """`then` where a key is null, else `otherwise` (OmegaConf has no conditional of its own)."""
    return then if value is None else otherwise


OURS = (dense_parameters, transformer_parameters, sum_of, when_null)
CONSTANT = {*(resolver.__name__ for resolver in OURS), "now", "sweep_name", "oc.env"}
"""Names of those that give the same for the same arguments as long as a command runs."""


def register() -> None:
    """Make them known to OmegaConf, as `${dense_parameters:…}` and so on. May be called twice.

    `${now:…}` means this moment from here on: Hydra's own is another one in each composition, which
    put a sweep's points into two folders wherever a second ended between them.
    """
    moment = datetime.now().astimezone()
    OmegaConf.register_new_resolver("now", moment.strftime, replace=True)
    for resolver in OURS:
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
