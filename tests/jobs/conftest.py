from tests.engine.torch.conftest import _torch_as_before  # noqa: F401
