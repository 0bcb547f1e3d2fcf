"""Packed datasets: prepared rows in a folder of Arrow files, memory-mapped. The names to import; no code.

    packed_format   dataset.json and the allowed values       packed_writer   rows in, parts out
    packed_reader   mapped columns, checked when first read   loader          shuffled batches, resumable

The specification is docs/format.md.
"""

from hotrow.data.packed.format import (
    ROWS_PER_BLOCK,
    Block,
    DatasetInfo,
    DenseColumn,
    Feature,
    FeatureKind,
    Ids,
    Part,
    Ragged,
    SourceFile,
    SplitInfo,
    Table,
)
from hotrow.data.packed.reader import PackedDataset, Split
from hotrow.data.packed.writer import ROWS_PER_PART, PackedWriter

__all__ = [
    "ROWS_PER_BLOCK",
    "ROWS_PER_PART",
    "Block",
    "DatasetInfo",
    "DenseColumn",
    "Feature",
    "FeatureKind",
    "Ids",
    "PackedDataset",
    "PackedWriter",
    "Part",
    "Ragged",
    "SourceFile",
    "Split",
    "SplitInfo",
    "Table",
]
