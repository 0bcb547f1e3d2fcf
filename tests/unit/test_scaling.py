"""Many ranks, modelled and run: steps on rows that are not drawn, machines with an SSD, cells of several processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from test_cost import DISK, NETWORK, machine, some_units

from benchmarks.study_sentences import nodes_told, sockets_told
from hotrow.config.load import make_config
from hotrow.costs.hardware import Figure, Hardware
from hotrow.costs.work import work_of
from hotrow.data.packed.reader import PackedDataset
from hotrow.data.sources.synthetic import zipf_rates
from hotrow.lab import mpi_start
from hotrow.lab.study import cells, scaling
from hotrow.lab.study.data import SyntheticRows
from hotrow.lab.study.run import run_study
from hotrow.lab.study.study import Cell, expand, read_study
from hotrow.setup.demand import tables_of

ROWS: dict[str, Any] = {"sizes": (300_000, 50_000), "dense": 4, "zipf": 1.05, "samples": 8192}
MODEL = {"embedding_dim": 8, "bottom_mlp": [16], "top_mlp": [16]}
SGD = {"dense": {"name": "sgd", "lr": 0.01}, "sparse": {"name": "sgd", "lr": 0.01}}
BASE = {"model": MODEL, "optimizer": SGD, "train": {"batch_size": 256, "threads": 1}, "memory": "dram"}


@pytest.mark.parametrize("lookups", [1.0, 4.0])
def test_a_step_on_rows_that_are_not_drawn(tmp_path: Path, lookups: float) -> None:
    """Against the same rows drawn, written, counted and read."""
    rows = SyntheticRows(**ROWS, lookups=lookups)
    (tmp_path / "data").mkdir()
    rows.write(tmp_path / "data")
    dataset = PackedDataset.open(tmp_path / "data")
    config = make_config({**BASE, "data": str(dataset.path)})
    drawn, made = work_of(config, tables_of(config, dataset), dataset), scaling.work_of_rows(config, rows)
    same = ("batch_size", "num_dense", "products", "pairs", "num_calls", "num_weights", "optimizer", "dense_optimizer")
    for name in same:
        assert getattr(made, name) == getattr(drawn, name), name
    for ours, theirs in zip(made.tables, drawn.tables, strict=True):
        assert ours.table.num_embeddings == theirs.table.num_embeddings and ours.jagged == theirs.jagged
        assert ours.record_bytes == theirs.record_bytes
        assert ours.lookups == pytest.approx(theirs.lookups, rel=0.03)
        assert ours.rows == pytest.approx(theirs.rows, rel=0.04)


def test_rates_add_up_and_fall() -> None:
    for zipf in (0.0, 1.0, 1.3):
        rates, rows = zipf_rates(1000, zipf, 50.0)
        assert rows.sum() == 1000 and rates @ rows == pytest.approx(50)
        assert (np.diff(rates) <= 1e-12).all()


@pytest.fixture
def server() -> Hardware:
    """A machine of four cores whose DRAM holds a third of the tables, with a fast disk."""
    work = scaling.work_of_rows(make_config({**BASE, "data": "-"}), SyntheticRows(**ROWS))
    num_bytes = sum(own.table.num_embeddings * own.record_bytes for own in work.tables)
    made = replace(machine(work, some_units), network=NETWORK, dram_bytes=Figure(num_bytes / 0.6 / 3 * 1.01))
    return replace(made, disks=[replace(DISK, sector_bytes=512)])


def cell(tmp_path: Path, **fields: Any) -> Cell:
    group = {"measures": "scaling", "base": {f"data.{k}": v for k, v in ROWS.items() if k != "sizes"}, **fields}
    group["base"] |= {"data.sizes": [*ROWS["sizes"]]}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump({"title": "T", "asks": "?", "base": BASE, "groups": {"g": group}}))
    (found,) = expand(read_study(path), origin="study")
    return found


def test_ranks_are_modelled_from_the_fewest_that_hold_the_tables(tmp_path: Path, server: Hardware) -> None:
    def modelled(ranks: int, **base: Any) -> dict[str, Any]:
        axes = {"ranks": [ranks], **{name: [value] for name, value in base.items()}}
        return scaling.modelled_of(cell(tmp_path, axes=axes), replace(server, num_cores=1, kernels=one))

    one = {phase: [p for p in own if p.sizes["threads"] == 1] for phase, own in server.kernels.items()}
    assert "3 ranks are needed to hold the tables" in modelled(2)["reason"]
    fewest, more = modelled(3), modelled(6)
    assert (fewest["efficiency"], fewest["least_ranks"]) == (pytest.approx(1), 3)
    assert more["speedup"] == pytest.approx(fewest["step_ms"] / more["step_ms"]) and more["efficiency"] < 1
    assert more["samples_per_s"] == pytest.approx(256e3 / more["step_ms"]) and more["exchange_ms"] > 0
    assert sum(more["parts_ms"].values()) == pytest.approx(more["step_ms"])
    assert more["binds"] == max(more["parts_ms"], key=lambda part: more["parts_ms"][part])
    weak = modelled(6, batch_per_rank=64)
    assert weak["samples_per_s"] == pytest.approx(6 * 64e3 / weak["step_ms"])
    assert weak["efficiency"] > more["efficiency"], "an exchange costs less beside more work"


def test_machines_with_an_ssd(tmp_path: Path, server: Hardware) -> None:
    asked = cell(tmp_path, measures="nodes", axes={"train.batch_size": [256]})
    fast = replace(server.disks[0], reads_per_s={"1": Figure(1e9)}, read_bytes_per_s=Figure(1e13))
    found = scaling.modelled_of(asked, replace(server, disks=[replace(fast, writes_per_s={"1": Figure(1e9)})]))
    assert (found["nodes_in_dram"], found["nodes_with_ssd"], found["fewer"]) == (3, 1, 3.0)
    slow = replace(server.disks[0], reads_per_s={"1": Figure(1.0)})
    found = scaling.modelled_of(asked, replace(server, disks=[slow]))
    assert (found["nodes_in_dram"], found["nodes_with_ssd"]) == (3, 3), "a disk of one read a second saves none"
    assert "no disk in its file" in scaling.modelled_of(asked, replace(server, disks=[]))["reason"]


def test_sentences_say_that_they_are_modelled() -> None:
    def row(group: str, preset: str, ranks: int, **found: Any) -> dict[str, Any]:
        return {"group": group, "ranks": ranks, "axes": {"preset": preset}, "modelled": {"cpu-server": found}}

    rows = [
        row("strong", "a", 8, efficiency=0.5, binds="latency", parts_ms={}),
        row("strong", "b", 8, reason="no"),
        row("nodes", "a", 1, reason="no"),
    ]
    told = sockets_told("cpu-server", {"cells": rows})
    assert told.startswith("modelled, not measured") and told.endswith("a 50% on 8 (latency)")
    assert sockets_told("another", {"cells": rows}).startswith("not modelled")
    assert nodes_told({"cells": rows}).endswith("with an SSD: a not known")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": 0}, "ranks is 0; it must be a whole number from 1"),
        ({"ranks": 2.0}, "ranks is 2.0; it must be a whole number"),
        ({"batch_per_rank": "x"}, "batch_per_rank is 'x'"),
        ({"transport": "tcp"}, "transport is 'tcp'"),
    ],
)
def test_what_a_cell_of_ranks_may_not_say(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cell(tmp_path, measures="speed", axes={"p": {"one": fields}})


# ---- a tiny study


def study(tmp_path: Path, **groups: Any) -> Path:
    base = {**BASE, "data": {"tables": 2, "rows": 300, "dense": 2, "samples": 2048}}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump({"title": "T", "asks": "?", "base": base, "rounds": 2, "groups": groups}))
    return path


def test_two_ranks_and_a_modelled_cell_end_to_end(
    tmp_path: Path, server: Hardware, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes, a real exchange, predicted first; beside them what nothing ran for."""
    monkeypatch.setattr(cells, "MAX_S", 0.1)
    many = {"measures": "scaling", "base": {"data.rows": 10_000}, "axes": {"ranks": [1, 4]}}
    path = study(tmp_path, ranks={"axes": {"transport": ["gloo", "mpi"], "ranks": [2]}}, many=many)
    raw = yaml.safe_load(path.read_text()) | {"predicts": True, "machines": ["cpu-server"]}
    path.write_text(yaml.safe_dump(raw))
    monkeypatch.setattr("hotrow.lab.study.run._machine", lambda name, here: replace(server, dram_bytes=Figure(1e12)))
    monkeypatch.setattr("hotrow.lab.study.run.known_hardware", lambda: replace(server, mpi=slow))
    slow, told = replace(NETWORK, s_per_message=Figure(1.0)), list[str]()
    result = run_study(str(path), tmp_path / "out", say=told.append)
    assert not result["skipped"], result["skipped"]
    rows = {row["key"].split("#")[0]: row for row in result["cells"]}
    transports = ["gloo"] if mpi_start.mpiexec() is None else ["gloo", "mpi"]
    assert any("over MPI are left out" in line for line in told) == (len(transports) == 1)
    for transport in transports:
        two = rows[f"ranks/ranks=2/transport={transport}"]
        assert two["status"] == "measured" and two["ranks"] == 2 and 0 < two["exchange_ms"] < two["step_ms"]
        assert two["wire_bytes"] == pytest.approx(two["predicted"]["wire_bytes"], rel=0.05)
        assert "modelled" not in two
        assert (two["predicted"]["exchange_ms"] > 1e3) == (transport == "mpi"), "each forecast takes its network"
    four = rows["many/ranks=4"]
    assert four["status"] == "modelled" and "step_ms" not in four and four["modelled"]["cpu-server"]["step_ms"] > 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "modelled: cpu-server, efficiency" in page and "None of this was measured. The same model was off by" in page
    assert "predicted exchanges, ms" in page and (tmp_path / "out" / "many.svg").exists()
    again = run_study(str(path), tmp_path / "out")
    assert [row.get("measured_at") for row in again["cells"]] == [row.get("measured_at") for row in result["cells"]]
