"""The exception of the development cluster; each message says what to do next."""


class DevClusterError(RuntimeError):
    """Refused or failed request to the development cluster."""
