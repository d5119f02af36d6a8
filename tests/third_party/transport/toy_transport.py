"""A transport of letters: every rank leaves its tensor in the store where all can read it.

python -m orchestrator.launch transport=mailbox ...
"""

import time
from datetime import timedelta

import torch
from torch.distributed import DistError

from orchestrator.engine.common.waiting import for_others
from orchestrator.engine.torch.group import BaseGroup, ChainedWork, sum_into
from orchestrator.engine.torch.transports import Transport
from orchestrator.errors import PeerLost

LEAVING_S = 5.0


class Mailbox(Transport):
    @classmethod
    def form(cls, spec, store):
        place = {"rank": spec.rank, "size": spec.size, "generation": spec.generation}
        return MailboxGroup(store, spec.collective_timeout_s, transport="mailbox", **place)


class MailboxGroup(BaseGroup):
    def __init__(self, store, timeout_s, **place):
        super().__init__(**place)
        self._store, self._timeout, self._turn = store, timedelta(seconds=timeout_s), 0

    def _letters(self, mine):
        """Return all ranks' tensors, flat and of one type, in the order of ranks."""
        turn, self._turn = self._turn, self._turn + 1
        letters = [f"{turn}/{rank}" for rank in range(self.size)]
        self._store.set(letters[self.rank], mine.view(torch.uint8).numpy().tobytes())
        try:
            with for_others():  # who waits for others does not hang itself
                self._store.wait(letters, self._timeout)
            read = [bytearray(letter) for letter in self._store.multi_get(letters)]
        except DistError as error:
            raise PeerLost(f"rank {self.rank} lost a peer: {error}") from error
        if turn:  # all have come to this turn, so no rank reads the one before any more
            self._store.delete_key(f"{turn - 1}/{self.rank}")
        empty = mine.new_empty(0)
        return [torch.frombuffer(one, dtype=mine.dtype) if one else empty for one in read]

    def close(self):
        """Rank 0, whose process holds the store, leaves last."""
        until, left = time.monotonic() + LEAVING_S, self._store.add("left", 1)
        while self.rank == 0 and left < self.size and time.monotonic() < until:
            left = self._store.add("left", 0)

    def _start_sum(self, flat):
        sum_into(flat, self._letters(flat))
        return ChainedWork()

    def _start_gather(self, parts, flat):
        for part, letter in zip(parts, self._letters(flat), strict=True):
            part.copy_(letter)
        return ChainedWork()

    def _start_reduce_scatter(self, out, tensor):
        sum_into(out, [letter.chunk(self.size)[self.rank] for letter in self._letters(tensor)])
        return ChainedWork()

    def _start_exchange(self, received, sent, receive_counts, send_counts):
        pieces = [letter.tensor_split(self.size)[self.rank] for letter in self._letters(sent)]
        received.copy_(torch.cat(pieces))
        return ChainedWork()

    def _start_broadcast(self, flat, source):
        flat.copy_(self._letters(flat if self.rank == source else flat[:0])[source])
        return ChainedWork()

    def _start_barrier(self):
        self._letters(torch.zeros(1))
        return ChainedWork()
