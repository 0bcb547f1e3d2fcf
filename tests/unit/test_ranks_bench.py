"""The benchmark of several processes counts what is sent, and compares like with like."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from benchmarks import rank_laws, ranks
from benchmarks.rank_sides import RankWork, Seat, num_lacking, owners, part_of, shards_of, tables_of
from benchmarks.step_shapes import make_setting
from hotrow.parallel.ranks import Ranks
from mpi_ranks import needs_mpi

pytestmark = pytest.mark.package


@pytest.mark.parametrize(("prefix", "sharding"), [(0.0, "row_wise"), (0.1, "row_wise"), (0.0, "table_wise")])
def test_rows_that_a_rank_lacks_against_sets(prefix: float, sharding: str) -> None:
    shape = RankWork(shape="kaggle", num_ranks=2, batch_size=64, small=True).sized()
    seat = Seat(rank=1, address="", sharding=sharding, prefix=prefix)
    own = part_of(make_setting(shape).batches[3], Ranks(1, 2, 2))
    ids = make_setting(shape).batches[3].sparse.values.view(len(shape.rows), 2, 32)[:, 1]  # the second half is rank 1's
    owner, num_rows = owners(len(shape.rows), 2), 0
    for t, rows in enumerate(ids.tolist()):
        first = int(np.ceil(prefix * shape.rows[t]))
        home = {row: (row - first) % 2 if sharding == "row_wise" else owner[t] for row in rows if row >= first}
        num_rows += sum(of == 0 for of in home.values())
    assert num_lacking(own, shards_of(tables_of(shape), seat, 2), 1, 2) == num_rows


def test_two_ranks_are_counted_by_the_kernel_as_by_hotrow() -> None:
    cell = ranks.wire("wire_kaggle_2_ranks", "kaggle", 2, quick=True)
    counted = sum(cell["counted_bytes"].values())
    assert cell["idle_bytes"] == 0
    assert cell["least_bytes"] < counted < cell["sent_bytes"] < counted + 20_000, "gloo's own headers are small"


@needs_mpi
def test_steps_over_mpi_are_taken_in_turns_with_those_over_gloo() -> None:
    cell = ranks.mpi_vs_gloo("mpi_vs_gloo_kaggle_2_ranks", "kaggle", 2, quick=True)
    assert {"ours_ms", "ours_cpu_ms", "peer_ms", "peer_cpu_ms", "ratio"} < cell.keys() and cell["ours_cpu_ms"] > 0


def test_losses_that_differ_are_not_timed() -> None:
    class Side:
        def __init__(self, *losses: list[float]) -> None:
            self.losses = losses

        def ask(self, **what: Any) -> list[dict[str, Any]]:
            return [{"losses": own} for own in self.losses]

    ours: Any = Side([0.5, 0.25], [0.5, 0.25])
    alike: Any = Side([0.4, 0.2], [0.6, 0.30001])
    ranks.compare("c", [ours, alike])
    other: Any = Side([0.4, 0.2], [0.6, 0.31])
    with pytest.raises(ValueError, match="cell c: the loss of step 1 is 0"):
        ranks.compare("c", [ours, alike, other])


def test_any_two_choices_meet_in_a_case_of_the_laws() -> None:
    found = [each for own in rank_laws.cases().values() for each in own if each.ranks != (1,)]
    choices = [rank_laws.OPTIMIZERS, rank_laws.RANKS, rank_laws.TABLES, ("dram", "tiers")]
    for a, b in combinations(range(4), 2):
        wanted = {(one, other) for one in choices[a] for other in choices[b]} - {("row_wise_adagrad", "column")}
        assert {(each[a], each[b]) for each in found} == wanted
    assert len(found) < 30
    assert all(own[0] == rank_laws.Case(name, memory="tiers") for name, own in rank_laws.cases().items())
