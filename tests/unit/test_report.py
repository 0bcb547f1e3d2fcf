"""The report of runs: what it says against the files it is made of, of runs that ended in every way."""

import errno
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from at_step import raise_at
from forked import COMMAND, run_forked
from hotrow.cli import tools
from hotrow.config.load import make_config
from hotrow.data.packed.reader import PackedDataset
from hotrow.report.facts import MAX_POINTS, RunFacts, points, read_lines, thin
from hotrow.report.page import report_page, sentences, summary
from hotrow.run import folder as run_folder
from hotrow.run import runs
from hotrow.run.folder import RunFolder
from loops import looped
from packed_data import planted

HOSTILE = "<script>alert(1)</script><b>&\"'"
MAX_BYTES = 1_500_000


class Elements(HTMLParser):
    """The elements of a page, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] not in ("script", "style"):
            self.text += data + "\n"


def record(**fields: Any) -> dict[str, Any]:
    plain = {"status": "finished", "command": ["hotrow", "train"], "started": "2026-01-01", "versions": {}, "host": {}}
    return {**plain, "warnings": {}, **fields}


def train_line(step: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 0.5 + 1 / step, "step_ms": {"data": 1.0, "dense": 3.0}, **fields}


def table(rows: int, pinned: int, cached: int) -> dict[str, Any]:
    figures = {"hits_per_lookup": 0.9, "hits_per_row": 0.5, "read_bytes": 4096, "written_bytes": 512}
    return {"rows": rows, "pinned": pinned, "cached": cached, "store": "block", **figures}


def large() -> RunFacts:
    names = [f"t{k}" for k in range(99)] + [HOSTILE]
    tables = {name: table(1000 + k, 100, 50) for k, name in enumerate(names)}
    memory = {"dram_bytes": 1 << 30, "disk_bytes": 1 << 34, "stall_share": 0.12, "hits_per_lookup": 0.9}
    memory |= {"tables": tables, "tiers": {"dram": {"tables": 100, "lookups": 5}, "ssd": {"tables": 99, "reads": 7}}}
    lines: list[dict[str, Any]] = [train_line(step) for step in range(1, 10_001)]
    for step in range(1000, 10_001, 1000):
        lines.append({"kind": "eval", "split": "val", "step": step, "auc": 0.7, "logloss": 0.4, "ne": 0.9})
        lines.append({"kind": "swap", "step": step, "logloss": 0.4, "rate": 50.0, "next_rate": 25.0, "turn": "hot"})
    swaps = [line for line in lines if line["kind"] == "swap"]
    fields = record(
        steps=10_000, epochs=2.0, samples_per_s=1e5, train_s=70.0, ended="all steps are done", memory=memory,
        step_ms={"data": 0.4, "lookup": 1.0, "dense": 2.0, "update": 0.6}, host={"usable_cores": 2},
        backend={"name": "native", "isa": "avx512", "threads": 1, "reason": None},
        metrics={"test": {"auc": 0.78, "logloss": 0.45, "ne": 0.82, "num_rows": 1234}},
        hot={"schedule": "fae", "hot_rows": 5, "hot_samples": 0.5, "swaps": swaps},
        warnings={"w": {"count": 2, "text": HOSTILE}}, write_budget={"budget": "1GB/day", "share_used": 0.5},
        trial={"date": HOSTILE, "step_ms": {"data": 0.5, "lookup": 1.0, "dense": 2.25, "update": 0.5}},
    )  # fmt: skip
    return RunFacts(name=f"runs/{HOSTILE}", record=fields, lines=lines)


def test_metrics_of_a_killed_run_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps(train_line(step)).encode() for step in (1, 2)]
    odd_lines = [b"\x00\xff{", b'{"kind": "train"}', b"[1]", b'{"kind": "train", "step": -1}']
    path.write_bytes(b"\n".join([whole[0], *odd_lines, whole[1], whole[0][:20]]))
    lines, left_out = read_lines(path)
    assert [line["step"] for line in lines] == [1, 2] and left_out == 5
    assert read_lines(tmp_path / "none") == ([], 0)
    odd = [train_line(1, loss="<b>"), train_line(2, loss=float("nan")), train_line(3, loss=True), train_line(4, loss=2)]
    assert points(odd, "train", "loss") == [(4.0, 2.0)]


def test_thinned_curves_keep_every_extreme_and_the_mean() -> None:
    values = np.random.default_rng(0).normal(size=10_007)
    values[5003] = 99.0
    curve = [(float(step), float(value)) for step, value in enumerate(values, 1)]
    found = thin(curve)
    assert len(found.curve) <= MAX_POINTS and len(found.band) == len(found.curve)
    assert max(high for *_, high in found.band) == 99.0 and min(low for _, low, _ in found.band) == values.min()
    size = found.per_point
    wanted = [values[k : k + size].mean() for k in range(0, len(values), size)]
    np.testing.assert_allclose([y for _, y in found.curve], wanted)
    parts = [values[k : k + size] for k in range(0, len(values), size)]
    assert [(low, high) for _, low, high in found.band] == [(part.min(), part.max()) for part in parts]
    assert thin(curve[:MAX_POINTS]).curve == curve[:MAX_POINTS]


# ---- the page


def test_a_large_run_fits_and_what_is_hostile_stays_text() -> None:
    page = report_page(large())
    assert len(page.encode()) <= MAX_BYTES
    found = Elements(page)
    assert found.tags.count("script") == 1 and "b" in found.tags, "the script of the page, and the cards' figures"
    assert found.tags.count("b") == 6 and HOSTILE in found.text
    assert not [name for name, _ in found.attributes if name in ("src", "href") or name.startswith("on")]
    for text in ("0.7800", "each point is the mean of 42 lines"):
        assert text in found.text.lower(), text


def test_a_day_that_was_scored_before_training_alone_is_not_said_to_be_scored_after_it() -> None:
    figures = {"num_rows": 1234, "auc": 0.78, "logloss": 0.41, "base_logloss": 0.5, "ne": 0.82}
    lines = [{"kind": "eval", "step": 0, "split": "train", **figures}, train_line(1)]
    day = RunFacts(name="r", record=record(parent={"path": "runs/a", "metrics": figures}), lines=lines)
    assert "the weights that it started from had" in sentences(day)[1]
    assert summary(day)["auc"] is None and summary(day)["split"] == ""


@looped("status", ["finished", "interrupted", "failed", "running"])
def test_a_record_that_came_to_nothing_has_a_page(status: str) -> None:
    page = Elements(report_page(RunFacts(name="r", record=record(status=status), lines_left_out=1)))
    assert "1 line of metrics.jsonl could not be read" in page.text
    assert "svg" not in page.tags


@looped("odd", [None, 3, "<b>", [], [1], {}, {"x": 1}, float("inf"), 10**400, -1e99])
def test_a_record_of_odd_types_has_a_page(odd: Any) -> None:
    """A part of run.json may be any JSON, and who edits the file can make its checksum right."""
    parts = ("tables", "tiers", "hbm", "stall_share", "hits_per_lookup", "dram_bytes")
    for memory in (odd, dict.fromkeys(parts, odd), {part: {"a": odd, "tables": odd} for part in parts}):
        hot = odd if memory is odd else {"swaps": odd}
        trial = odd if memory is odd else {"step_ms": {"dense": odd}}
        fields = record(memory=memory, hot=hot, trial=trial, write_budget=odd, metrics=odd, step_ms=odd)
        lines = [train_line(1, step_ms=odd, loss=odd), {"kind": "eval", "step": 2, "auc": odd, "split": odd}]
        page = Elements(report_page(RunFacts(name="r", record=fields, lines=lines)))
        assert "b" in page.tags and page.tags.count("b") >= 6


def test_a_training_loss_that_is_no_logloss_says_so() -> None:
    plain = replace(large(), options={"train.pos_weight": "1.0"})
    weighted = replace(large(), options={"train.pos_weight": "5.0"})
    assert "training, pos_weight 5.0" in report_page(weighted)
    assert "training, " not in report_page(plain)


def config_for(dataset: PackedDataset, run: Path, **train: Any) -> Any:
    raw = {
        "data": str(dataset.path),
        "run": str(run),
        "model": {"embedding_dim": 4, "bottom_mlp": [8], "top_mlp": [8]},
        "train": {"batch_size": 16, "threads": 1, "log_every": 4, **train},
    }
    return make_config(raw)


dataset = planted(opened=True, rows={"train": 256, "val": 64, "test": 64}, counts=True)


def test_every_end_leaves_a_page(dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = runs.train(config_for(dataset, tmp_path / "whole"), quiet=True)
    auc = whole.record.metrics["test"]["auc"]  # type: ignore[index]
    assert f"{auc:.4f}" in Elements((whole.path / "report.html").read_text()).text
    assert (whole.path / "report.html").stat().st_mode & 0o777 == 0o600

    raise_at(monkeypatch, None, ValueError("the model is on fire"))
    with pytest.raises(ValueError, match="on fire"):
        runs.train(config_for(dataset, tmp_path / "failed"), quiet=True)
    assert "the model is on fire" in Elements((tmp_path / "failed" / "report.html").read_text()).text


def test_a_page_that_cannot_be_written_costs_a_warning(
    dataset: PackedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder, "write_report", full)
    with pytest.warns(UserWarning, match=r"report.html was not written \(OSError.*hotrow report "):
        run = runs.train(config_for(dataset, tmp_path / "run"), quiet=True)
    assert RunFolder.open(run.path).record.status == "finished"
    assert run.record.warnings["no_report"]["count"] == 1
    assert not (run.path / "report.html").exists()


def test_the_verb(dataset: PackedDataset, tmp_path: Path) -> None:
    runs.train(config_for(dataset, tmp_path / "a"), quiet=True)
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    told = tools.report(tmp_path / "a", out=tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size == told["bytes"] and told["lines_left_out"] == 1
    assert tools.report(tmp_path / "a")["out"] == str(tmp_path / "a" / "report.html")
    json.dumps(told, allow_nan=False)
    with pytest.raises(ValueError, match="is a folder; name a file"):
        tools.report(tmp_path / "a", out=tmp_path)
    tools.report(tmp_path / "a", out=tmp_path / "page.html")
    (tmp_path / "keep.yaml").write_text("mine: true\n")
    with pytest.raises(ValueError, match=r"keep\.yaml exists and is not a report of hotrow; name another file"):
        tools.report(tmp_path / "a", out=tmp_path / "keep.yaml")
    assert (tmp_path / "keep.yaml").read_text() == "mine: true\n"
    done = run_forked(COMMAND, "report", tmp_path / "none")
    assert done.returncode == 2 and "is not a run" in done.stderr and "Traceback" not in done.stderr


def test_a_killed_run_is_told_from_one_that_trains(dataset: PackedDataset, tmp_path: Path) -> None:
    run = runs.train(config_for(dataset, tmp_path / "run"), quiet=True)
    run.update(status="running")
    assert not run.facts().is_training
    with run.claimed():
        assert RunFolder.open(run.path).facts().is_training


def test_a_report_in_a_browser(tmp_path: Path) -> None:
    """Nothing on its console, nothing wider than the window, and a script that lets tables be sorted."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium is installed: pages are not looked at in a browser (apt-get install chromium)")
    page = report_page(large())
    fits = "<script>document.title = document.documentElement.scrollWidth <= innerWidth</script></body>"
    pages = {"plain": page, "measured": re.sub("<meta http-equiv[^>]*>", "", page).replace("</body>", fits)}
    for name, width in (("plain", 1280), ("measured", 500), ("measured", 820)):
        (tmp_path / name).with_suffix(".html").write_text(pages[name])
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        options += [f"--window-size={width},900", "--enable-logging=stderr", "--dump-dom"]
        line = [browser, *options, (tmp_path / name).with_suffix(".html").as_uri()]
        done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120)
        assert "CONSOLE" not in done.stderr and ("<title>true</title>" in done.stdout) == (name == "measured"), width
        assert "<button" in done.stdout.partition("<thead")[2], "no head of a table can be pressed"
