from tests.third_party.conftest import installed, target

__all__ = ["installed", "target"]
