"""The torch job whose net, data and loss are those of `jobs.digits_mindspore`."""

from safetensors.torch import load_file

from jobs.digits import Digits


class TorchTwin(Digits):
    def __init__(self, initial_weights, layers):
        super().__init__(layers=layers)
        self.initial_weights = initial_weights

    def model(self):
        net = super().model()
        net.load_state_dict(load_file(self.initial_weights))
        return net
