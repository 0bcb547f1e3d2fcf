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

    A message is a 1-dim, contiguous tensor on the CPU with at least one element; the receiver knows its length and
    type. Messages of one rank to another with the same tag arrive in the order in which they were sent; those with
    another tag may be received before them. Only one thread of a rank calls its transport.
    """

    def send(self, message: Tensor, to: int, tag: int) -> InFlight:
        """Begins to send; `message` must stay as it is until the caller has waited."""

    def receive(self, into: Tensor, source: int, tag: int) -> InFlight:
        """Begins to receive a message of rank `source` into the memory of `into`."""
