import pytest
import torch


@pytest.fixture(autouse=True)
def _as_before():
    """One thread each, as ranks have here; what an engine sets for good is taken back."""
    before, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(mode=strict)
