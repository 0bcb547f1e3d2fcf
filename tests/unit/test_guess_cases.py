"""Whole tables with what public logs are made of: each column gets the right use, whatever it is called."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from hotrow.data.prepare.init import render_schema
from hotrow.data.prepare.prepare import run_prepare
from hotrow.data.sources.guess import SchemaGuess, guess_columns
from hotrow.data.sources.schema import load_schema
from loops import looped

N = 12_000
START = datetime.datetime(2024, 3, 1)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def roles(guess: SchemaGuess) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for g in guess.guesses:
        found.setdefault(g.column, set()).add(g.role)
    return found


def installs(rate: float = 0.004) -> pa.Table:
    """Clicks on ads, few of them followed by an install: one id tells nearly all, and that is what it is for."""
    rng = np.random.default_rng(0)
    num_rows = 40_000
    app, os, channel = (rng.zipf(a, num_rows) % count for a, count in ((1.3, 161), (1.5, 130), (1.2, 160)))
    effects = [np.random.default_rng(i).normal(0, s, 200) for i, s in enumerate((3.2, 0.9, 1.4))]
    effects[0][:12] = -6
    logit = effects[0][app] + effects[1][os] + effects[2][channel]
    installed = rng.random(num_rows) < sigmoid(logit + np.log(rate / (1 - rate)) - 1)
    time = [START + datetime.timedelta(seconds=int(s)) for s in np.sort(rng.integers(0, 300_000, num_rows))]
    later = [t + datetime.timedelta(seconds=90) if i else None for t, i in zip(time, installed, strict=True)]
    columns = {"app": app, "os": os, "channel": channel, "click_time": time, "attributed_time": later}
    return pa.table({**columns, "is_attributed": installed.astype(int)})


def test_a_strong_id_stays_and_is_named() -> None:
    """AUC above 0.95 alone; it was left out as a leak, and other ids were numbers."""
    table = installs()
    for given in (table, table.drop_columns("attributed_time"), table.drop_columns("click_time")):
        guess = guess_columns(given, label="is_attributed")
        found = roles(guess)
        assert all("categorical" in found[name] for name in ("app", "os", "channel"))
        assert "column app alone predicts the label with AUC 0.9" in guess.summary()
        assert found.get("attributed_time", {""}) == {""}
        assert guess.split_kind == ("time" if "click_time" in given.column_names else "random")


def test_ids_are_ids_under_any_name() -> None:
    """Ids 1 to 399 were numbers, unless their name was a known one."""
    names = ["publisher", "creative", "placement", "sku", "shop", "country", "page", "slot", "num_seller", "price"]
    rng = np.random.default_rng(1)
    ids = {name: rng.integers(1, 400, N) for name in names}
    effects = {name: rng.normal(0, 0.5, 400) for name in names}
    label = rng.random(N) < sigmoid(sum(effects[name][ids[name]] for name in names) - 1)
    found = roles(guess_columns(pa.table({"label": label.astype(int), **ids}), label="label"))
    assert {name: found[name] for name in names} == {name: {"categorical"} for name in names}


AFTER: dict[str, Callable[[np.random.Generator, np.ndarray[Any, Any]], Any]] = {
    "like": lambda rng, click: click * (rng.random(N) < 0.2),
    "share": lambda rng, click: np.where(click & (rng.random(N) < 0.1), "yes", "no"),
    "watch_s": lambda rng, click: np.where(click, rng.exponential(30, N).round(1), 0.0),
    "basket": lambda rng, click: np.where(click & (rng.random(N) < 0.5), rng.integers(1, 9, N), 0),
    "refund": lambda rng, click: click & (rng.random(N) < 0.1),
    "closed": lambda rng, click: np.where(~click & (rng.random(N) < 0.5), "closed", "open"),
    "told": lambda rng, click: np.where(click ^ (rng.random(N) < 0.002), "yes", "no"),
    "conversion": lambda rng, click: (rng.random(N) < np.where(click, 0.3, 0.05)).astype(int),
}


@looped("name", AFTER)
def test_what_happens_after_the_click_is_left_out(name: str) -> None:
    """Written as 0 or "no" for other rows, it was kept."""
    rng = np.random.default_rng(2)
    user = rng.integers(0, 300, N)
    click = rng.random(N) < sigmoid(rng.normal(0, 1, 300)[user] - 1.5)
    table = pa.table({"click": click.astype(int), "user": user, name: AFTER[name](rng, click)})
    guess = guess_columns(table, label="click")
    assert roles(guess)[name] == {""} and "categorical" in roles(guess)["user"]
    (left,) = [g for g in guess.guesses if g.column == name]
    assert left.reason.startswith("a leak: ") and f"column {name} " in guess.summary()
    kept = guess_columns(table, label="click", categorical=[name])
    assert roles(kept)[name] == {"categorical"}


def test_honest_flags_stay() -> None:
    """Rows that hardly anyone clicks, or that nearly all click, are known before."""
    rng = np.random.default_rng(3)
    robot, member = rng.random(N) < 0.02, rng.random(N) < 0.05
    click = rng.random(N) < np.where(robot, 0.0005, np.where(member, 0.9, 0.02))
    table = pa.table({"click": click.astype(int), "robot": robot, "member": member, "tag": rng.integers(0, 9, N)})
    guess = guess_columns(table, label="click")
    assert {name for name in roles(guess) if "categorical" in roles(guess)[name]} == {"robot", "member", "tag"}


def bookings() -> pa.Table:
    """A date that is set with the outcome: a cancellation comes before the stay, all else after it."""
    rng = np.random.default_rng(4)
    agent, company = rng.integers(0, 300, N) * 3.0 + 1, rng.integers(0, 200, N) * 2.0
    lead = np.floor(rng.exponential(80, N))
    effect = rng.normal(0, 1, 1000)[agent.astype(int)] + 0.01 * (lead - 80)
    canceled = rng.random(N) < sigmoid(effect - 0.7)
    stay = rng.integers(100, 160, N)
    decided = np.where(canceled, stay - rng.integers(1, 101, N), stay + 3)
    return pa.table(
        {
            "is_canceled": canceled.astype(int),
            "lead": lead.astype(int),
            "agent": pa.array(agent, mask=rng.random(N) < 0.1),
            "company": pa.array(company, mask=rng.random(N) < 0.9),
            "status": np.where(canceled, np.where(rng.random(N) < 0.1, "no show", "canceled"), "stayed"),
            "status_date": [START.date() + datetime.timedelta(days=int(d)) for d in decided],
        }
    )


def test_a_date_that_is_set_with_the_outcome_is_not_split_by() -> None:
    guess = guess_columns(bookings(), label="is_canceled")
    found = roles(guess)
    assert guess.split_kind == "random" and found["status_date"] == {""}
    assert "--time status_date" in guess.summary()
    assert found["status"] == {""} and "categorical" in found["agent"]
    assert "dense" in found["lead"]
    told = guess_columns(bookings(), label="is_canceled", time="status_date")
    assert told.of("time")[0].column == "status_date"
    rng = np.random.default_rng(5)
    honest = bookings().append_column(
        "arrival", pa.array([START + datetime.timedelta(minutes=int(m)) for m in rng.integers(0, 10**5, N)])
    )
    assert guess_columns(honest, label="is_canceled").of("time")[0].column == "arrival"


def test_of_several_times_the_one_of_the_event_is_split_by() -> None:
    """Whatever their order and names: neither the day, nor a user's first visit."""
    rng = np.random.default_rng(6)
    user = rng.integers(0, 500, N)
    event = [START + datetime.timedelta(seconds=int(s)) for s in rng.integers(0, 10**6, N)]
    first = [START - datetime.timedelta(seconds=int(s)) for s in rng.integers(0, 10**7, 500)[user]]
    columns = {"a": first, "b": [t.date() for t in event], "c": event, "user": user, "click": rng.integers(0, 2, N)}
    for names in (["a", "b", "c"], ["c", "b", "a"], ["b", "a", "c"]):
        table = pa.table({**{name: columns[name] for name in names}, "user": user, "click": columns["click"]})
        assert guess_columns(table, label="click").of("time")[0].column == "c"


def numbers_alone() -> pa.Table:
    rng = np.random.default_rng(7)
    columns = {f"n{i}": rng.normal(0, 1, N) for i in range(4)}
    logit = columns["n0"] ** 2 + (columns["n1"] > 0.5) * 2 - 2 + columns["n2"]
    return pa.table({"label": (rng.random(N) < sigmoid(logit)).astype(int), **columns})


def test_numbers_alone_are_enough(tmp_path: Path) -> None:
    """They were refused, as no column held ids."""
    guess = guess_columns(numbers_alone(), label="label")
    schema = guess.schema()
    assert schema.dense_names == ("n0", "n1", "n2", "n3")
    assert {"n0", "n1"} <= set(schema.feature_names)
    (tmp_path / "schema.yaml").write_text(render_schema(guess))
    assert load_schema(tmp_path / "schema.yaml") == schema
    dataset = run_prepare("frame", numbers_alone(), tmp_path / "out", schema=schema)
    tables = {table.name: table.num_embeddings for table in dataset.info.tables}
    for spec in schema.categorical:
        assert spec.buckets is not None and tables[spec.column] == len(spec.buckets) + 2, "a row for each, and row 0"


def test_counts_of_real_logs_are_numbers(real_data: Callable[[str], Path]) -> None:
    """Half of them were ids alone."""
    guess = guess_columns(real_data("criteo_terabyte_80k.tsv.gz"), label="c0")
    found = roles(guess)
    assert [name for name in found if "dense" in found[name]] == [f"c{i}" for i in range(1, 14)]
    assert all(found[f"c{i}"] == {"categorical"} for i in range(14, 40))
