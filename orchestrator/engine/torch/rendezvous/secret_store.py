"""A store that only those can speak through who may read the run folder.

torch's TCPStore takes orders from whoever reaches its port. The secret of one start stands in the
rendezvous file, in the private run folder: all keys are below a prefix made from it, and all that
counts is signed with it. What is not signed was not said.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

DIGITS = 64


class SecretStore:
    """Values that can be told and heard, and counters, which are hints only: they have no sign."""

    def __init__(self, store: TCPStore, secret: str) -> None:
        self._secret = secret.encode()
        self._own: dict[str, Any] = {}
        self._whole = store  # lives as long as this does
        self.below = PrefixStore(self._sign("prefix", b"")[:32], store)

    def tell(self, name: str, value: Any) -> None:
        content = json.dumps(value)  # ASCII
        self._own[name] = value  # whatever becomes of it in the store
        self.below.set(name, self._sign(name, content.encode()) + content)

    def told(self, name: str) -> Any | None:
        """What somebody who knows the secret has told under this name; None before."""
        return self.all_told([name])[0]

    def all_told(self, names: Sequence[str]) -> list[Any | None]:
        """`told` of all these names, in two steps for however many."""
        asked = [name for name in names if name not in self._own]
        if not asked or self.below.check(asked):
            contents = self.below.multi_get(asked) if asked else []
            heard = {n: self._heard(n, bytes(c)) for n, c in zip(asked, contents, strict=True)}
            return [self._own[name] if name in self._own else heard[name] for name in names]
        return [self.told(name) for name in names] if len(names) > 1 else [None]

    def _heard(self, name: str, content: bytes) -> Any | None:
        sign, value = content[:DIGITS], content[DIGITS:]
        if not hmac.compare_digest(sign, self._sign(name, value).encode()):
            return None
        return json.loads(value)

    def count(self, name: str, more: int = 0) -> int:
        return self.below.add(name, more)

    def _sign(self, name: str, content: bytes) -> str:
        return hmac.new(self._secret, name.encode() + b"\n" + content, hashlib.sha256).hexdigest()
