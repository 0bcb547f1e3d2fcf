"""Steps with the GPUs of a declared machine: parts against counting them by hand, and where rows lie."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hotrow.costs.declared import LIKELY, USABLE, with_gpus
from hotrow.costs.hardware import Figure, Gpu, Hardware
from hotrow.costs.work import TableWork, Work
from hotrow.tables import TableConfig

GPU = Gpu("gpu", Figure(1e9), Figure(1e11), Figure(1e10), Figure(2e10), {"fp32": Figure(1e13)})
MACHINE = Hardware(
    name="box", date="2026-11-01", host={}, versions={}, num_cores=4, dram_bytes=Figure(1e12), gpus=[GPU]
)
HOST_S = {"data": 1e-4, "lookup": 2e-3, "dense": 1.0, "update": 3e-3}


def table(rows: int = 1000, dim: int = 16, lookups: float = 2048.0) -> TableWork:
    config = TableConfig(name="t", num_embeddings=rows, embedding_dim=dim, feature_names=("f",))
    return TableWork(table=config, lookups=lookups, rows=500.0, record_bytes=4 * dim)


def work(*tables: TableWork, **changes: Any) -> Work:
    fields: dict[str, Any] = {
        "batch_size": 1024, "num_dense": 8, "products": ((1024, 8, 16), (1024, 24, 1)), "constant_inputs": (0,),
        "pairs": ((1024, 3, 16),), "num_calls": 5, "num_weights": 168, "optimizer": "sgd", "dense_optimizer": "sgd",
        "precision": "fp32", "threads": 4,
    }  # fmt: skip
    return Work(tables=tables or (table(),), **(fields | changes))


def machine(**changes: Any) -> Hardware:
    return replace(MACHINE, gpus=[replace(GPU, **changes)])


def test_a_step_on_one_gpu_against_counting_by_hand() -> None:
    multiply_adds = 2 * 1024 * 8 * 16 + 3 * 1024 * 24 + 3 * 1024 * 3 * 16  # three pairs of vectors
    values = 1024 * (8 + 16) + 1024 * (24 + 1)
    moved = 12 * values + 12 * 168 + 2048 * (64 + 64) + 2 * 500 * 64
    seconds = (
        2 * multiply_adds / (1e13 * LIKELY.products)
        + moved / (1e11 * LIKELY.memory)
        + (8 * 2048 + 4 * 1024 * 8) / (1e10 * LIKELY.links)
        + (2 * 5 + 3 * 2 + 2 * 1 + 20) * LIKELY.launch_s
    )
    found = with_gpus(work(), MACHINE, HOST_S)
    assert found.step_s == pytest.approx(seconds) and (found.rows_on, found.binds) == ("GPUs", "launches")
    assert found.range_s[0] < found.step_s < found.range_s[1]


def test_gpus_that_share_a_step_send_each_other_vectors_and_gradients() -> None:
    fast, slow, none = (
        with_gpus(work(), machine(count=4, peer_bytes_per_s=rate), HOST_S).step_s
        for rate in (Figure(1e10), Figure(1e9), None)
    )
    vectors, gradients = 2 * 4 * 1024 * 16 * 3 / 4, 2 * 3 * 4 * 168
    each_s = (vectors + gradients) / 4 / LIKELY.links
    assert slow - fast == pytest.approx(each_s * (1 / 1e9 - 1 / 1e10))
    assert none - fast == pytest.approx(each_s * (1 / 2e10 + 1 / 1e10 - 1 / 1e10)), "through the host"


def test_tables_that_do_not_fit_stay_on_the_host() -> None:
    most = int(USABLE * 1e9 / 64)
    assert with_gpus(work(table(most)), MACHINE, HOST_S).rows_on == "GPUs"
    found = with_gpus(work(table(most + 1)), MACHINE, HOST_S)
    assert (found.rows_on, found.binds) == ("host", "rows on the host") and found.step_s > 5e-3
    assert with_gpus(work(table(most + 1)), machine(count=2), HOST_S).rows_on == "GPUs"


def test_a_slow_loader_binds() -> None:
    found = with_gpus(work(), MACHINE, {**HOST_S, "data": 0.5})
    assert (found.step_s, found.binds) == (0.5, "data") and found.range_s[0] < 0.01


def test_what_cannot_be_modelled_is_refused() -> None:
    with pytest.raises(ValueError, match="box declares no gpus"):
        with_gpus(work(), replace(MACHINE, gpus=[]), HOST_S)
    with pytest.raises(ValueError, match=r"box has no product_flops_per_s.fp32 of gpu: declare it"):
        with_gpus(work(), machine(product_flops_per_s={}), HOST_S)
    with pytest.raises(ValueError, match="box has several kinds of GPU"):
        with_gpus(work(), replace(MACHINE, gpus=[GPU, replace(GPU, name="other")]), HOST_S)
