"""A job that talks, for looking at logs."""

from tests.light_job import Light


class Talking(Light):
    def loss(self, model, batch):
        print("hello", flush=True)
        return super().loss(model, batch)
