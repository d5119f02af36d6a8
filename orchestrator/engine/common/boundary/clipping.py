"""The one factor that averages, unscales and clips a gradient: the same in both engines."""

from __future__ import annotations

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_, so that clipping agrees with it


def factor_for(norm: float, divisor: float, clip_norm: float | None) -> tuple[float, float]:
    """(norm of the averaged gradient, factor to multiply the summed one with).

    Args:
        norm: of the summed gradient.
        divisor: what the sum is to be divided by: the window's weight, times the loss scale.
        clip_norm: largest norm of the averaged gradient, or None.

    >>> factor_for(8.0, 4.0, None)
    (2.0, 0.25)
    """
    averaged = norm / divisor
    if clip_norm is None:
        return averaged, 1.0 / divisor
    return averaged, min(1.0, clip_norm / (averaged + EPSILON)) / divisor
