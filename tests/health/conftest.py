"""Run folders as a page's tests have them."""

from tests.report.conftest import made

__all__ = ["made"]
