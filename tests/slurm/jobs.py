"""Jobs that do what a test wants to see."""

from pathlib import Path

from tests.light_job import Light


class Talking(Light):
    def loss(self, model, batch):
        print("hello", flush=True)
        return super().loss(model, batch)


class Hurried(Light):
    """Is slow until there is a file."""

    def __init__(self, until, **more):
        super().__init__(**more)
        self.until = Path(until)

    def loss(self, model, batch):
        if self.until.exists():
            self.pause_s = 0.0
        return super().loss(model, batch)
