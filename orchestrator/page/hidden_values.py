"""What a page does not show of a configuration: values whose key says that they are secret."""

from __future__ import annotations

from typing import Any

from orchestrator.report.terminal import harmless

WORDS = ("token", "secret", "password", "passwd", "passphrase", "api_key", "apikey", "credential")


def shown(key: str, value: Any) -> str:
    """A value as text, unless its key's name says that it is a secret.

    >>> shown("job.api_key", "x"), shown("job.width", 3)
    ('(hidden)', '3')
    """
    secret = any(word in key.lower() for word in WORDS)
    return "(hidden)" if secret and value is not None else harmless(value)


def hidden(override: str) -> str:
    """An override without its value, where that is a secret."""
    key, equals, value = override.partition("=")
    return f"{key}{equals}{shown(key, value)}"
