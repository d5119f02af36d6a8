"""The one exception of the development cluster: every message says what to do next."""


class DevClusterError(RuntimeError):
    """The development cluster cannot do what was asked; the message is written for a person."""
