"""Laws 2 and 3 for runs whose rows lie in DRAM, in a file used as memory, and on disk."""

import json
import signal
from pathlib import Path

import pytest
from test_resume import config, outcome, signal_at, tiers

import hotrow
from hotrow.kernels import ops
from hotrow.run import runs
from packed_data import planted

pytestmark = pytest.mark.skipif(ops.backend().name != "native", reason="tiers need the native module")
data = planted(table_rows=(600, 20, 1400))


@pytest.mark.slow_but("24000")
@pytest.mark.parametrize("file_bytes", [24_000, "1GiB"])
def test_a_run_in_three_tiers_is_the_run_in_dram(data: Path, tmp_path: Path, file_bytes: int | str) -> None:
    """Also one that is stopped there and goes on in two tiers, and the other way round."""
    expected = outcome(runs.train(config(data, tmp_path / "plain", [])))
    three = tiers(data, [], file=str(tmp_path / "fast"), file_bytes=file_bytes)
    run = runs.train(config(data, tmp_path / "three", [], three))
    assert outcome(run) == expected
    first = (run.path / "log.txt").read_text().splitlines()[0]
    assert f"on disk in {run.path}/memory, " in first and f"before it in {tmp_path}/fast" in first
    large = json.loads((run.path / "run.json").read_text())["memory"]["tables"]["t2"]
    assert large["cached"] < large["rows"] and large["store"] == "block"
    if file_bytes == "1GiB":
        assert large["read_rows"] == large["written_rows"] == 0, "there was a place for every row before the disk"
    else:
        assert large["read_rows"] > 0 and large["written_rows"] > 0, "nothing came to the disk"
    assert not (run.path / "memory").exists() and list((tmp_path / "fast").iterdir()) == [], "files were left behind"

    for stop, (name, before, after) in enumerate([("down", three, tiers(data, [])), ("up", tiers(data, []), three)], 9):
        with pytest.MonkeyPatch.context() as patch:
            signal_at(patch, stop, signal.SIGTERM)
            run = runs.train(config(data, tmp_path / name, [], before))
        assert (run.record.status, run.record.steps) == ("interrupted", stop)
        run = runs.resume(run.path, [f"memory={after}"])
        assert outcome(run) == expected, name
    scores = [hotrow.load(tmp_path / name).evaluate() for name in ("plain", "down", "up")]
    assert scores[1] == scores[2] == scores[0], "tables that are only read"
