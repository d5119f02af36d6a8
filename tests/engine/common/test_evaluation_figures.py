"""What evaluate() may give, and what is said of anything else. Both engines ask here."""

import math
import warnings

import numpy as np
import pytest
import torch

from orchestrator.engine.common.evaluation_figures import checked_figures
from orchestrator.errors import JobError


class Digits:
    """Stands for a user's job: only its name matters."""


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "must return figures by name, as in return {'accuracy': 0.9}, but returned nothing"),
        ([0.9], "but returned a list"),
        (0.9, "but returned a float"),
        (("accuracy", 0.9), "but returned a tuple"),
        ({"accuracy": "high"}, "'accuracy' must be one number, but is a str, 'high'"),
        ({"accuracy": "0.9"}, "'accuracy' must be one number, but is a str, '0.9'"),
        ({"accuracy": None}, "'accuracy' must be one number, but is a NoneType, None"),
        ({"accuracy": [1.0, 2.0]}, "'accuracy' must be one number, but is a list, [1.0, 2.0]"),
        ({"a": 1, "b": torch.ones(3)}, "'b' must be one number, but is a Tensor of shape (3,)"),
        ({"a": np.ones((2, 2))}, "'a' must be one number, but is a ndarray of shape (2, 2)"),
        ({"a": torch.empty(0)}, "'a' must be one number, but is a Tensor of shape (0,)"),
        ({"a": 1j}, "'a' must be one number, but is a complex, 1j"),
    ],
)
def test_what_is_no_dictionary_of_numbers_is_refused_in_the_jobs_name(given, told):
    with pytest.raises(JobError) as refused:
        checked_figures(given, Digits())
    assert "Digits.evaluate()" in str(refused.value)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "number", [1, 1.0, True, torch.tensor(1.0), torch.ones(1, 1), np.float32(1), np.ones(1)]
)
def test_numbers_of_any_kind_are_figures(number):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checked_figures({"accuracy": number}, Digits()) == {"accuracy": 1.0}


@pytest.mark.parametrize("number", [math.nan, math.inf, torch.tensor(-math.inf)])
def test_figures_that_are_not_finite_are_kept_and_warned_of(number):
    with pytest.warns(UserWarning, match="Digits.evaluate\\(\\)'s 'loss' is -?(nan|inf)"):
        figures = checked_figures({"loss": number, "right": 1}, Digits())
    assert not math.isfinite(figures["loss"])
