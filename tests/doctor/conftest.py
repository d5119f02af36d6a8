"""Run folders as a page's tests have them."""

from tests.page.conftest import made

__all__ = ["made"]
