"""A reader's job that trains slowly while a file exists."""

import time
from pathlib import Path

from tests.light_job import Light


class Held(Light):
    """See `Light`."""

    def __init__(self, hold=""):
        super().__init__()
        self.slow_while = Path(hold.removeprefix("at:"))  # with it no data, which would be compared

    def model(self):
        print("it begins")
        return super().model()

    def loss(self, model, batch):
        if self.slow_while.exists():
            time.sleep(1)
        return super().loss(model, batch)
