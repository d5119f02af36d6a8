"""A job of torch's that ends or stands still where and in whom one likes."""

from tests.acting_job import Acting
from tests.tiny_job import Tiny


class Lively(Acting, Tiny):
    """See `Acting`."""
