"""Groups of rows that have the same value of a feature, such as the rows of a user."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.base.records import nearest
from hotrow.batch import Batch
from hotrow.data.packed.format import DatasetInfo

MAX_NAMED = 12


class Groups:
    """The groups that the values of feature `by` make. Raises ValueError, with the cure, if it is not a feature of
    `info` with one id per row."""

    def __init__(self, info: DatasetInfo, by: str) -> None:
        own = {feature.name: feature for feature in info.features}
        single = [name for name, feature in own.items() if feature.kind == "one_hot"]
        if by not in single:
            why = f"a row has a list of ids of {by}" if by in own else f"the dataset has no feature {by}"
            raise ValueError(
                f"metrics.by is {by!r}, but {why}{nearest(by, single) or ';'} It may be "
                f"{', '.join(single[:MAX_NAMED]) or 'nothing'}{', ...' if len(single) > MAX_NAMED else ''}: choose "
                "one, or list the column under categorical in the schema and prepare the data again"
            )
        table = info.table_by_name[own[by].table]
        self.by = by
        shared = [] if table.vocabulary is None else [0, table.missing_row or 0]
        self._shared = torch.tensor(shared, dtype=torch.int64)

    def of(self, batch: Batch) -> Tensor:
        """Returns the group of each sample, int64 [B]: its row in the table. It is -1 for rare, unseen and missing
        values, because they share a row."""
        rows_B = batch.sparse.values[batch.sparse.span(self.by)].long()
        return torch.where(torch.isin(rows_B, self._shared), -1, rows_B)
