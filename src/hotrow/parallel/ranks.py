"""Who trains a model together, as a value: this rank, the others, and the micro-batches that each of them holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hotrow.kernels import tree

TransportName = Literal["gloo", "mpi"]


@dataclass(frozen=True)
class Ranks:
    """This rank among those that share a model; without arguments, one process that trains alone.

    ranks = Ranks(rank=1, size=4, micro_batches=8)
    first, end = ranks.samples(len(batch))      # this rank trains these samples of a global batch
    """

    rank: int = 0
    size: int = 1
    micro_batches: int = 1
    """V: a global batch is cut into this many parts, fixed for the life of a run; at least `size`."""
    local_rank: int = 0
    """Number of this rank among those on its machine."""
    local_size: int = 1
    """Ranks on this machine, which share its cores and memory."""
    transport: TransportName | None = None
    """Over which the ranks exchange messages; None if that is not known, as in a plan for machines elsewhere."""

    def with_micro_batches(self, micro_batches: int) -> Ranks:
        """Returns the same ranks for a number of micro-batches. Raises ValueError if a rank would have none."""
        if micro_batches < self.size:
            raise ValueError(
                f"train.micro_batches is {micro_batches}, but there are {self.size} ranks, and each needs one: start "
                f"at most {micro_batches}, or set it to {self.size} or more in a new run"
            )
        return replace(self, micro_batches=micro_batches)

    @property
    def held(self) -> tuple[int, int]:
        """The first micro-batch of this rank, and the end of its last one."""
        return tree.held(self.micro_batches, self.rank, self.size)

    def samples(self, num_samples: int, rank: int | None = None) -> tuple[int, int]:
        """The first sample of a global batch that a rank (None: this one) trains, and the end of its last."""
        starts = tree.starts(num_samples, self.micro_batches)
        first, last = tree.held(self.micro_batches, self.rank if rank is None else rank, self.size)
        return starts[first], starts[last]
