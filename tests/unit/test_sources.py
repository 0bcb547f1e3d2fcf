"""The built-in layouts on rows made in their published form, and on real rows where they are at hand."""

import gzip
from pathlib import Path

import pytest

from hotrow.data.chunk import RowError
from hotrow.data.sources.columns import ColumnsSource
from hotrow.data.sources.criteo import CriteoSource
from hotrow.data.sources.registry import AVAZU_COLUMNS, looks_like_avazu, looks_like_taobao, open_source
from hotrow.data.sources.schema import parse_schema
from loops import looped
from raw_rows import read


def test_taobao_events_are_labelled_by_behaviour(tmp_path: Path) -> None:
    path = tmp_path / "UserBehavior.csv"
    path.write_text("1,2268318,2520377,pv,1511544070\n1,2333346,2520771,cart,1511561733\n100,5,6,buy,1511600000\n")
    rows = read(open_source("taobao", path).source)
    assert rows["label"] == [0, 1, 1]
    assert rows["user"] == [1, 1, 100] and rows["item"][0] == 2268318 and rows["category"][1] == 2520771
    assert rows["time"] == [1511544070, 1511561733, 1511600000]
    assert looks_like_taobao("1,2268318,2520377,pv,1511544070") and not looks_like_taobao("a,b,c,d,e")


def test_an_unknown_behaviour_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "UserBehavior.csv"
    path.write_text("1,2,3,pv,1511544070\n1,2,3,share,1511561733\n2,2,3,,1511561734\n3,2,3,buy,1511561735\n")
    message = (
        r"UserBehavior.csv:2 \(behaviour\): 'share' is not a label; it must be one of cart, fav, buy, pv; correct "
        "the row, or let bad rows be left out \\(--skip-bad-rows N, in Python skip_bad_rows=N\\)"
    )
    with pytest.raises(RowError, match=message):
        read(open_source("taobao", path).source)
    source = open_source("taobao", path, skip_bad_rows=2).source
    assert read(source)["label"] == [0, 1]
    assert source.skipped.num_rows == 2
    assert "UserBehavior.csv:3" in source.skipped.examples[1]


@looped(
    ("label", "message"),
    [
        ({"negative": ["pv"]}, "'negative' needs 'positive'"),
        ({"positive": ["buy", "pv"], "negative": ["pv"]}, "'pv' is both 'positive' and 'negative'"),
        ({"positive": ["buy"], "negative": []}, "negative"),
    ],
)
def test_values_of_a_label_fit_together(label: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_schema({"label": {"column": "x", **label}, "categorical": ["a"]}, where="s")


def test_integer_labels_may_be_listed_too(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("x,a\n3,u\n0,v\n5,w\n")
    schema = parse_schema({"label": {"column": "x", "positive": [3], "negative": [0]}, "categorical": ["a"]}, where="s")
    with pytest.raises(RowError, match=r"x.csv:4 \(x\): '?5'? is not a label; it must be one of 3, 0"):
        read(ColumnsSource(path, schema))
    assert read(ColumnsSource(path, schema, skip_bad_rows=1))["label"] == [1, 0]


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "UserBehavior.csv"
    path.write_text("1,2,3,pv,1511544070\n")
    (tmp_path / "link.csv").symlink_to(path)
    with pytest.raises(ValueError, match=rf"{path}: this file is given twice; its rows would count double"):
        open_source("taobao", [path, path])
    with pytest.raises(ValueError, match=rf"link.csv: this file is given twice, once as {path}; .* name it once"):
        open_source("taobao", [path, tmp_path / "link.csv"])
    with pytest.raises(ValueError, match="given twice"):
        open_source("taobao", [tmp_path / "User*.csv", f"{tmp_path}/../{tmp_path.name}/UserBehavior.csv"])
    with pytest.raises(ValueError, match="given twice"):
        CriteoSource([path, path])


def test_real_taobao_events(real_data) -> None:
    rows = read(open_source("taobao", real_data("taobao_userbehavior_110k.csv.gz")).source)
    assert len(rows["label"]) == 110_300
    assert rows["time"] == sorted(rows["time"])
    assert 0 < sum(rows["label"]) < 0.2 * len(rows["label"])


AVAZU_ROW = (
    "1000009418151094273,0,14102100,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,a99f214a,ddd2926e,"
    "44956a24,1,2,15706,320,50,1722,0,35,-1,79"
)


def test_avazu_header_hours_and_hex_ids(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text(",".join(AVAZU_COLUMNS) + "\n" + AVAZU_ROW + "\n")
    rows = read(open_source("avazu", path).source)
    assert rows["label"] == [0] and rows["time"] == [14102100]
    assert rows["device_ip"] == ["ddd2926e"] and rows["C20"] == ["-1"]
    assert len(rows) == 3 + 21
    assert looks_like_avazu(",".join(AVAZU_COLUMNS))


def test_avazu_test_file_has_no_label(tmp_path: Path) -> None:
    path = tmp_path / "test.csv"
    columns = [c for c in AVAZU_COLUMNS if c != "click"]
    fields = AVAZU_ROW.split(",")
    path.write_text(",".join(columns) + "\n" + ",".join(fields[:1] + fields[2:]) + "\n")
    assert looks_like_avazu(",".join(columns))
    chunk = next(open_source("avazu", path, labels="ignored").source.chunks())
    assert chunk.label is None and chunk.num_rows == 1
    with pytest.raises(ValueError, match="lacks column 'click'"):
        open_source("avazu", path)


@looped("source", ["auto", "avazu", "taobao", "csv"])
def test_a_file_cut_short_is_named_whoever_looks_at_it_first(source: str, tmp_path: Path) -> None:
    path = tmp_path / "ratings.csv.gz"
    rows = "userId,movieId,rating,timestamp\n" + "1,2,3,4\n" * 999
    path.write_bytes(gzip.compress(rows.encode())[:-20])
    with pytest.raises(ValueError, match=r"ratings\.csv\.gz: .*fetch it again"):
        open_source(source, path)


@looped("end", ["\n", "\r\n"])
@looped("bad", ["1e999,u1,1", "0.5,u1,7", "0.5,u1"])
def test_lines_are_those_of_an_editor(bad: str, end: str, tmp_path: Path) -> None:
    schema = parse_schema({"label": "click", "dense": ["price"], "categorical": ["user"]}, where="s")
    lines = ["", "price,user,click", "0.5,u1,0", "", "", '0.5,"a', 'b",1', "0.5,u3,1", "", bad, "0.5,u1,1", "", bad, ""]
    path = tmp_path / "rows.csv"
    path.write_bytes(b"\xef\xbb\xbf" + end.join(lines).encode())
    first, second = (i + 1 for i, line in enumerate(lines) if line == bad)
    with pytest.raises(RowError, match=rf"rows\.csv:{first}[: ]"):
        read(ColumnsSource(path, schema))
    source = ColumnsSource(path, schema, skip_bad_rows=2)
    assert read(source)["user"] == ["u1", f"a{end}b", "u3", "u1"]
    first_text, second_text = source.skipped.examples
    assert f"rows.csv:{first}" in first_text and f"rows.csv:{second}" in second_text


def test_bad_events_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("1,2,3,pv,10\n1,2.5,3,pv,11\n")
    with pytest.raises(RowError, match=r"x\.csv:2 \(item\): '2.5' is not an exact integer id"):
        read(open_source("taobao", path).source)
