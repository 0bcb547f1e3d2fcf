"""The seam to what carries messages between ranks: torch's gloo (gloo.py), or another one in a file of its own."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class InFlight(Protocol):
    """A message that is being sent or received."""

    def wait(self) -> object:
        """Returns when the message is here, or when its memory may be used again. Raises any error if that cannot be,
        as after another rank has ended."""


class Transport(Protocol):
    """Carries messages between this rank and others.

    A message is a 1-dim, contiguous tensor of uint8 on the CPU with at least one byte; the receiver knows its length.
    Of messages of one rank to another with the same tag, the first that `receive` was called for is the first that was
    sent, whichever the caller waits for first; those with another tag may be received before them. Only one thread of a
    rank calls its transport.
    """

    def send(self, message: Tensor, to: int, tag: int) -> InFlight:
        """Begins to send; `message` must stay as it is until the caller has waited."""

    def receive(self, into: Tensor, source: int, tag: int) -> InFlight:
        """Begins to receive a message of rank `source` into the memory of `into`."""
