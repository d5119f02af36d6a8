import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Ranks have one thread each in these tests; kernels split over two may round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
