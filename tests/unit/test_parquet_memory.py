"""Reading Parquet holds a batch of rows, whatever the size of the file."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotrow.data.sources.columns import input_files
from hotrow.data.sources.tabular import ColumnarReader


def test_a_file_is_never_held_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "ids.parquet"
    with pq.ParquetWriter(path, pa.schema([("id", pa.int64())]), compression="none", use_dictionary=False) as writer:
        for _ in range(64):
            writer.write_table(pa.table({"id": rng.integers(0, 1 << 62, 1 << 17)}))
    before, most = pa.total_allocated_bytes(), 0
    for _ in ColumnarReader(input_files(str(path))).read(0, 0, ["id"], 1 << 12):
        most = max(most, pa.total_allocated_bytes() - before)
    assert path.stat().st_size > 64 << 20
    assert most < path.stat().st_size / 4
