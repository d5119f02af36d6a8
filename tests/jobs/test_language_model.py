"""The transformer's update is that of one big batch; every job's parameters are counted."""

import pytest
import torch

from jobs.language_model import BEGIN, PADDING, LanguageModel
from jobs.python_source import Paragraphs
from orchestrator.config.composer import compose
from orchestrator.trainer.job_class import build_job
from tests.jobs.training import train
from tests.laws.problem import difference

SMALL = {"width": 16, "layers": 1, "heads": 2, "context": 40, "sequences": 60, "held_out": 20}


def test_three_ranks_train_like_one_on_sequences_of_different_lengths():
    job = LanguageModel(**SMALL, dropout=0.0)
    (alone, reports, _), *_ = train(job, 1, samples=20, updates=3, cap=20)
    for found, found_reports, _ in train(job, 3, samples=20, updates=3, cap=3):
        assert difference(found, alone) <= 1e-10
        assert [r.weight for r in found_reports] == [r.weight for r in reports]
        assert all(r.collectives == 1 for r in found_reports)


def test_a_batch_begins_with_a_byte_of_its_own_and_ends_with_padding():
    job = LanguageModel(**SMALL)
    first, second = torch.tensor([5, 6, 7]), torch.tensor([8])
    inputs, targets = job.collate([first, second])
    assert inputs.tolist() == [[BEGIN, 5, 6], [BEGIN, 8, BEGIN]]
    assert targets.tolist() == [[5, 6, 7], [8, PADDING, PADDING]]


def test_bits_per_byte_of_a_model_that_knows_nothing_are_eight():
    job = LanguageModel(**SMALL)
    model = job.model().eval()
    for parameter in model.parameters():
        parameter.data.zero_()
    assert abs(job.evaluate(model)["bits_per_byte"] - 8) < 1e-5


def test_held_out_text_is_of_other_files():
    job = LanguageModel(**SMALL)
    train_text = {bytes(piece.tolist()) for piece in job.dataset()}
    held_out = {bytes(piece.tolist()) for piece in Paragraphs(20, 40, held_out=True)}
    assert not train_text & held_out


@pytest.mark.parametrize(
    "overrides",
    [
        ("job=contrastive", "job.width=20"),
        ("job=jepa", "job.width=24", "job.layers=3"),
        ("job=language_model", "job.width=32", "job.layers=3"),
        ("job=gpt2", "job.width=20", "job.layers=3", "job.letters=7"),
        ("job=vae", "job.hidden=20", "job.latent=3"),
    ],
)
def test_the_configuration_knows_the_number_of_trained_parameters(overrides):
    config = compose(list(overrides))
    parameters = build_job(config.job).model().parameters()
    assert config.facts.parameters == sum(p.numel() for p in parameters if p.requires_grad)
