"""The README's promises: its Python runs, its commands and links exist, the examples run."""

import inspect
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

import hotrow.api
from forked import run_python
from hotrow.data.sources.options import NAMES

pytestmark = [pytest.mark.package, pytest.mark.usefixtures("one_thread")]
ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder_with_clicks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that holds clicks.csv, as the README's examples expect."""
    generator = np.random.default_rng(0)
    rows = ["user,item,price,ts,click"]
    for ts in range(600):
        item = generator.integers(0, 20)
        click = int(generator.random() < (0.7 if item % 2 else 0.1))
        rows.append(f"u{generator.integers(0, 30)},i{item},{generator.random():.3f},{1_700_000_000 + 60 * ts},{click}")
    (tmp_path / "clicks.csv").write_text("\n".join(rows) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_python_blocks_run_as_written(block: str, folder_with_clicks: Path) -> None:
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    if "scores" in names:
        assert len(names["scores"]) == 600  # type: ignore[arg-type]


@pytest.mark.slow
def test_estimators_run_as_shown(folder_with_clicks: Path) -> None:
    section = (ROOT / "docs" / "python.md").read_text().partition("## In scikit-learn\n")[2].partition("\n## ")[0]
    exec(compile(re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[0], "docs/python.md", "exec"), {})


def test_fit_is_documented_and_runs_as_shown(folder_with_clicks: Path) -> None:
    section = (ROOT / "docs" / "python.md").read_text().partition("## Rows in, model out\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/python.md", "exec"), {})
    assert pq.read_table("scores.parquet").column_names == ["user", "item", "score"]
    assert Path("clicks-export/export.json").is_file()
    own = {*inspect.signature(hotrow.api.fit).parameters} - {*NAMES, "overrides"}
    members = {name for name in vars(hotrow.Run) if not name.startswith("_")} | {"seen"}
    shown = set(re.findall(r"`(\w+)(?:\(.*?\))?`", section))
    assert own | members <= shown, f"docs/python.md does not name {sorted((own | members) - shown)}"


def test_links_lead_somewhere() -> None:
    run_python(ROOT / "scripts" / "docs.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed; `make docs` brings it")
    out = tmp_path_factory.mktemp("site")
    run_python(ROOT / "scripts" / "docs.py", out)
    return out


def test_the_site_has_every_page_in_its_navigation_and_needs_no_network(site: Path) -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    home = (site / "index.html").read_text()
    for page in pages:
        name = page.relative_to(ROOT).with_suffix(".html").as_posix().replace("README.html", "index.html")
        html = (site / name).read_text()
        assert f'href="{name}"' in home or name == "index.html", f"the navigation lacks {name}"
        assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=.?https?:", html), f"{name} loads from a network"


def test_the_python_reference_has_every_public_name_and_what_its_docstring_says(site: Path) -> None:
    names = re.findall(r"^::: hotrow\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    estimators = {"Classifier", "Regressor"}  # not in __all__, as they need scikit-learn
    assert sorted(names) == sorted({*hotrow.__all__} - {"__version__"} | estimators)
    html = (site / "docs" / "api.html").read_text()
    for name in names:
        assert f'<h3 id="{name.lower()}' in html


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version == hotrow.__version__ == yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()


OTHERS = {"histories.py", "own_model.py", "prepare_ray.py", "with_lightning.py", "with_accelerate.py"}
"""Examples that have a test of their own."""


@pytest.mark.parametrize(
    "path",
    sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in OTHERS),
    ids=lambda path: path.name,
)
def test_examples_run(path: Path, folder_with_clicks: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("package", ["lightning", "accelerate"])
def test_the_plain_loop_is_the_same_under_a_trainer(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed; pip install 'hotrow[test]' brings it")
    monkeypatch.syspath_prepend(ROOT / "examples")
    losses = []
    for name in ("plain_loop.py", f"with_{package}.py"):
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        losses += re.findall(r"last loss ([\d.]+)", capsys.readouterr().out)
    assert len(losses) == 2 and losses[0] == losses[1] and float(losses[0]) < 0.1


def test_example_own_model_learns(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "own_model.py"), run_name="__main__")
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < 0.8 * losses[0]


def test_imports_shown_on_the_pages_work() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for line in re.findall(r"^from hotrow[\w.]* import [\w, ]+", page.read_text(), re.MULTILINE):
            try:
                exec(line, {})
            except ImportError as error:
                pytest.fail(f"docs/{page.name}: {line}: {error}")


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "papers").glob("*.md")), ids=lambda page: page.stem)
def test_files_named_on_the_pages_of_papers_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w/-]+/[\w-]+\.(?:py|cpp|yaml)|[\w-]+\.py)`", page.read_text()))
    assert named
    missing = {name for name in named if not any((root / name).exists() for root in (ROOT, ROOT / "src" / "hotrow"))}
    assert not missing


PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
CHECK = """
import csv
import sys

from hotrow.config.load import load_config

sys.path.insert(0, "tower-export")
import score

model = load_config("runs/tower/config.yaml").model
assert isinstance(model, TowerSpec) and model.width == 32
with open("clicks.csv") as file:
    rows = list(csv.DictReader(file))
scorer = score.Scorer("tower-export")
theirs = scorer.score({name: [row[name] for row in rows] for name in scorer.columns})
ours = hotrow.load("runs/tower").predict("clicks.csv")
assert max(ours) - min(ours) > 0.01 and abs(ours - theirs.numpy()).max() < 1e-5, (ours, theirs)
"""


def test_the_page_runs_as_written(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("## Add a model of your own\n")[2].partition("\n## ")[0]
    model, program = re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (tmp_path / "tower.py").write_text(model)
    (tmp_path / "program.py").write_text(program + CHECK)
    rng = np.random.default_rng(0)
    users, prices = rng.integers(0, 20, 400), rng.random(400)
    clicks = rng.random(400) < np.where(users % 2, 0.8, 0.2)
    rows = [f"{click:d},u{user},{price:.3f}" for click, user, price in zip(clicks, users, prices, strict=True)]
    (tmp_path / "clicks.csv").write_text("\n".join(["click,user,price", *rows]) + "\n")
    # Its own process: the list of models is read once.
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
