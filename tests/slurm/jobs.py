"""A job that talks, for looking at logs."""

from tests.tiny_job import Tiny


class Talking(Tiny):
    def loss(self, model, batch):
        print("hello", flush=True)
        return super().loss(model, batch)
