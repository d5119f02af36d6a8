"""The configuration of a job states how many parameters its model has."""

import pytest

from orchestrator.config.composer import compose
from orchestrator.trainer.setup import build_job


@pytest.mark.parametrize(
    "overrides",
    [
        ("job=contrastive", "job.width=20"),
        ("job=jepa", "job.width=24", "job.layers=3"),
        ("job=language_model", "job.width=32", "job.layers=3"),
    ],
)
def test_the_configuration_knows_the_number_of_trained_parameters(overrides):
    config = compose(list(overrides))
    parameters = build_job(config.job).model().parameters()
    assert config.facts.parameters == sum(p.numel() for p in parameters if p.requires_grad)
