import pytest
import torch


@pytest.fixture(autouse=True)
def _torch_as_before():
    """Compute on one thread, as ranks do here: kernels split over two may round differently.

    Restore what an engine sets for good.
    """
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(strict)
    torch.utils.deterministic.fill_uninitialized_memory = filling
