"""Look-ahead: batches are announced to the tables before they are needed, so that a step does not wait for its rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch import nn

from hotrow.batch import Batch, KeyedJaggedTensor
from hotrow.placement.base import Placement

Item = TypeVar("Item")
_END: Any = object()
"""Marks the end of a loader, which may yield None by mistake."""


class Lookahead(Generic[Item]):
    """Yields batches while the rows of the next `depth` batches are on their way; see `lookahead`."""

    def __init__(self, batches: Iterable[Item], module: nn.Module, *, depth: int) -> None:
        if not isinstance(depth, int) or depth < 0:
            raise ValueError(f"depth is {depth}; it must be 0 (rows are read when they are needed) or a larger integer")
        if not isinstance(module, nn.Module):
            raise ValueError(f"lookahead was given a {type(module).__name__} to look ahead for; pass the nn.Module")
        self.batches: Any = batches
        self.depth = depth
        placements = [getattr(part, "placement", None) for part in module.modules()]  # EmbeddingCollections have one
        self.placements: list[Placement] = [own for own in placements if own is not None and own.looks_ahead]
        self._state: Any = None

    def state(self) -> Any:
        """Returns the loader's `state()` at the last batch yielded here, not at the last one read ahead."""
        return self.batches.state() if self._state is None else self._state

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Item]:
        """Announces and yields batches; forgets those that were not used, also when the loop is left early."""
        waiting: deque[tuple[Item, Any]] = deque()
        source, more = iter(self.batches), True
        state_of = getattr(self.batches, "state", lambda: None)
        item = None
        try:
            while True:
                while more and len(waiting) <= self.depth:
                    following = next(source, _END)
                    more = following is not _END
                    if more:
                        if self.depth:
                            self._each("announce", following)
                        waiting.append((following, state_of()))
                if not waiting:
                    return
                item, self._state = waiting.popleft()
                yield item
                self._each("forget", item)
        finally:
            for left, _ in waiting:
                self._each("forget", left)
            if item is not None:
                self._each("forget", item)

    def _each(self, verb: str, item: Item) -> None:
        if not self.placements:
            return
        try:
            sparse = KeyedJaggedTensor.of(item.sparse if isinstance(item, Batch) else item)
        except ValueError as error:
            raise ValueError(
                f"lookahead was given a {type(item).__name__} among the batches; it knows Batch and KeyedJaggedTensor, "
                f"so wrap the loader in a generator of those ({error})"
            ) from None
        for placement in self.placements:
            getattr(placement, verb)(sparse)


def lookahead(batches: Iterable[Item], module: nn.Module, *, depth: int = 4) -> Lookahead[Item]:
    """Iterates over `batches`; the rows of the next `depth` are on their way while one is trained on.

        for batch in hotrow.lookahead(loader, emb, depth=4): ...

    batches: of `Batch` or `KeyedJaggedTensor`, also torchrec's. module: an EmbeddingCollection or a module that holds
    some; those without Memory need no look-ahead. A batch that is skipped, changed, or looked up twice is exact all the
    same. depth 0: rows are read when they are looked up. Leaving the loop lets go of what was announced.
    Raises ValueError for a negative depth and, while it runs, for batches of another kind.
    """
    return Lookahead(batches, module, depth=depth)
