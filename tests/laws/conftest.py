from tests.engine.torch.conftest import _one_thread  # noqa: F401
