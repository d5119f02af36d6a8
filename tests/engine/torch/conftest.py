import pytest
import torch

from orchestrator.engine.torch.gradients import buffer


@pytest.fixture(autouse=True)
def _one_thread():
    """Ranks have one thread each in these tests; kernels split over two may round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["as they come", "after the backward"])
def first_gradients(request, monkeypatch):
    """A window's first gradients get to their places in either way: of large models, of small."""
    monkeypatch.setattr(buffer, "SMALL_BYTES", 0 if request.param == "as they come" else 2**30)
