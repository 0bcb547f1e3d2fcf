"""The automatic recipe: sane at any size. How good it is, benchmarks/quality.py measures."""

from pathlib import Path

import numpy as np
import pytest

from hotrow.config.load import apply_overrides, make_config
from hotrow.config.recipe import as_overrides, choose_recipe
from hotrow.data.prepare.init import render_recipe, run_init
from hotrow.models import MODELS
from loops import looped


@looped("num_rows", [0, 1, 63, 1000, 19_999, 20_000, 80_000, 600_000, 5_000_000, 5_000_001, 10**9])
@looped("model", MODELS)
def test_every_size_has_a_recipe(num_rows: int, model: str) -> None:
    recipe = choose_recipe(num_rows, model=model)
    config = make_config(apply_overrides({"data": "d"}, [f"model.name={model}", *as_overrides(recipe)]))
    assert 64 <= config.train.batch_size <= 2048
    assert 1 <= config.train.epochs <= 30
    schedule = config.optimizer.schedule
    steps = config.train.epochs * max(1, -(-num_rows // config.train.batch_size))
    assert schedule.warmup_steps + schedule.decay_steps in (0, steps), "the rate ends at zero"
    assert config.train.early_stopping is not None
    assert "train.early_stopping" not in choose_recipe(num_rows, validated=False)
    rated = choose_recipe(num_rows, model=model, rated=True)
    assert rated == recipe | ({"calibration.method": "slope"} if num_rows <= 5_000_000 else {})
    assert choose_recipe(num_rows, validated=False, rated=True) == choose_recipe(num_rows, validated=False)


def test_rates_and_schedule_follow_what_the_user_chose() -> None:
    recipe = choose_recipe(64_000, batch_size=32, epochs=5)
    assert recipe["optimizer.schedule.warmup_steps"] + recipe["optimizer.schedule.decay_steps"] == 5 * 2000
    # One sample's gradient is at most 1 / 32: so 64 of them equal the initial sum of squares.
    assert recipe["optimizer.sparse"]["initial_accumulator_value"] == pytest.approx(64 * (1 / 32) ** 2)


def test_small_files_have_as_many_steps_as_the_mlps_need() -> None:
    for num_rows in (3_000, 10_000, 40_000, 80_000):
        recipe = choose_recipe(num_rows)
        assert recipe["train.epochs"] * num_rows / recipe["train.batch_size"] > 990


def test_init_writes_the_recipe_that_fit_uses(tmp_path: Path) -> None:
    import hotrow

    generator = np.random.default_rng(0)
    users = generator.integers(0, 50, 3000)
    clicks = generator.random(3000) < np.where(users % 3 == 0, 0.7, 0.2)
    lines = [f"{int(click)},u{user}" for click, user in zip(clicks, users, strict=True)]
    (tmp_path / "x.csv").write_text("\n".join(["click,user", *lines]) + "\n")
    run = hotrow.fit(tmp_path / "x.csv", run=tmp_path / "run", quiet=True, threads=1, refit=False, max_steps=4)
    run_init(tmp_path / "run" / "data", out=tmp_path / "init")
    written = hotrow.load_config(tmp_path / "init" / "recipe.yaml")
    used = hotrow.load_config(run.path / "config.yaml")
    for section in ("model", "optimizer"):
        assert getattr(written, section) == getattr(used, section)
    decided = {name: getattr(written.train, name) for name in ("threads", "micro_batches", "max_steps")}
    assert written.train == used.train.model_copy(update=decided)
    about = make_config({"data": "x"} | _parsed(render_recipe("x", 3000, exact=False)))
    assert about.train.batch_size == written.train.batch_size


def test_a_recipe_for_one_model_trains_another(tmp_path: Path) -> None:
    import hotrow

    rows = {"click": [0, 1, 1, 0] * 40, "user": [f"u{k % 7}" for k in range(160)]}
    recipe = {"model": {"bottom_mlp": [4], "embedding_dim": 3}, "train": {"max_steps": 2, "threads": 1}}
    with pytest.warns(UserWarning, match=r"model\.bottom_mlp"):
        told = {"label": "click", "config": recipe, "run": tmp_path / "run", "quiet": True}
        run = hotrow.fit(rows, model="dcn", deep_mlp=[5], **told)
    model = hotrow.load_config(run.path / "config.yaml").model
    assert model.model_dump(exclude_defaults=True) == {"embedding_dim": 3, "deep_mlp": [5]}
    assert recipe["model"] == {"bottom_mlp": [4], "embedding_dim": 3}
    refused = pytest.raises(ValueError, match=r"model\.top_mlp for model dcn; it is one of dlrm and tbsm")
    with pytest.warns(UserWarning, match=r"model\.bottom_mlp"), refused:
        hotrow.fit(rows, config=recipe, model="dcn", **{"model.top_mlp": [3]})


def _parsed(text: str) -> dict[str, object]:
    from hotrow.config.load import parse_yaml

    return dict(parse_yaml(text, origin="recipe"))
