"""Values of a configuration as text, without those that are secrets."""

from __future__ import annotations

from typing import Any

from orchestrator.report.terminal import harmless

SECRET_NAMES = (
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "api_key",
    "apikey",
    "credential",
)


def shown(key: str, value: Any) -> str:
    """Return a value as text, unless its key's name says that it is a secret.

    >>> shown("job.api_key", "x"), shown("job.width", 3), shown("accumulation.micro_tokens", "64")
    ('(hidden)', '3', '64')
    """
    is_count = key.lower().endswith("tokens") and str(value).isdigit()
    secret = not is_count and any(part in key.lower() for part in SECRET_NAMES)
    return "(hidden)" if secret and value is not None else harmless(value)


def hidden(override: str) -> str:
    """Return an override, without its value if that is a secret."""
    key, equals, value = override.partition("=")
    return f"{key}{equals}{shown(key, value)}"
