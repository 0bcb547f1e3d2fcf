"""Losses and tables of small runs stay as they were, to the bit: see losses.py."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from golden.losses import LOSSES, RANKS, RECIPES, STEPS, learned, prepare, this_kind
from rank_pool import RankPool

RECORDED = json.loads(LOSSES.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("losses")
    prepare(found)
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(RANKS) as pool:
        yield pool


@pytest.mark.skipif(this_kind() not in RECORDED, reason=f"no losses are recorded for {this_kind()}")
@pytest.mark.parametrize("name", RECIPES)
def test_losses_are_those_recorded(folder: Path, ranks: RankPool, name: str) -> None:
    known = RECORDED[this_kind()][name]  # without what moved on purpose and was not recorded anew on such a processor
    found = learned(folder, name, ranks)
    assert {what: found[what] for what in known} == known


def test_every_record_is_of_every_recipe() -> None:
    for recorded in RECORDED.values():
        assert recorded.keys() == RECIPES.keys()
        assert all(len(own["losses"]) == STEPS for own in recorded.values())
        of_ranks, of_parts = recorded["2 ranks"]["losses"], recorded["4 micro-batches"]["losses"]
        assert of_ranks != of_parts and recorded["tiers"] != recorded["plain"]
