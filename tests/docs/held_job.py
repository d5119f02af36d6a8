"""A job of a reader's, which takes its time for as long as a file is there."""

import time
from pathlib import Path

from tests.light_job import Light


class Held(Light):
    """See `Light`."""

    def __init__(self, hold=""):
        super().__init__()
        self.hold = Path(hold)

    def model(self):
        print("it begins")
        return super().model()

    def loss(self, model, batch):
        if self.hold.exists():
            time.sleep(1)
        return super().loss(model, batch)
