"""The config schema: what is accepted, what is refused and with which words, and that docs/config.md says the same."""

import re
import runpy
import warnings
from itertools import pairwise, product
from pathlib import Path

import pytest
from pydantic import BaseModel

from hotrow.config.load import apply_overrides, load_config, make_config, options_of, parse_yaml, sections
from hotrow.config.schema import interval_steps, is_due
from hotrow.models import MODELS
from loops import looped

ROOT = Path(__file__).resolve().parents[2]
PAGE = runpy.run_path(str(ROOT / "scripts" / "config_page.py"))

# Every public option. An addition, a removal or a new default shows up here as a diff.


def test_every_model_is_in_the_union() -> None:
    """A config of each, by its name alone, is of that model, and comes back so from its YAML."""
    for name, spec in MODELS.items():
        config = make_config({"data": "d", "model": {"name": name}})
        assert type(config.model) is spec
        assert make_config(parse_yaml(config.to_yaml(), origin="")) == config
    assert type(make_config({"data": "d"}).model) is next(iter(MODELS.values()))


def test_docs_are_generated() -> None:
    page = PAGE["config_markdown"]()
    assert (ROOT / "docs/config.md").read_text() == page, "run: python scripts/config_page.py > docs/config.md"


NINES = "9" * 400
ABSURD = (NINES, f"-{NINES}", f"'{NINES}'", f"{NINES}GiB", f"{NINES}.5GiB", f"{NINES}GB/day", "1e400", "-1e400")
ABSURD += (".inf", ".nan", str(2**63), str(-(2**63) - 1), "{}", "[]", "true")
OPTIONS = [(section, path + name) for _, path, section in sections() for name in options_of(section)]


@looped(("section", "path"), OPTIONS)
def test_absurd_values_are_refused_by_their_option(section: type[BaseModel], path: str) -> None:
    """Or taken, if any number or text may stand there; nothing else comes of them, and no error is a page long."""
    model = next((name for name, spec in MODELS.items() if spec is section), next(iter(MODELS)))
    for value in ABSURD:
        try:
            config = make_config(apply_overrides({"data": "d", "model": {"name": model}}, [f"{path}={value}"]))
        except ValueError as error:
            assert path.rpartition(".")[2] in str(error) and len(str(error)) < 600
        else:
            assert make_config(parse_yaml(config.to_yaml(), origin="")) == config
            assert path in ("data", "run", "from_run", "memory.ssd", "memory.file") or len(value) < 400


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_recipes_are_valid(recipe: Path) -> None:
    load_config(recipe)


@looped(
    ("raw", "message"),
    [
        ({"trian": {}}, "unknown key trian; did you mean 'train'?"),
        ({"train": {"batchsize": 1}}, r"unknown key train\.batchsize; did you mean 'batch_size'?"),
        ({"train": {"batch_size": 0}}, r"train\.batch_size is 0; allowed: an integer >= 1"),
        ({"train": 3}, "train is 3; allowed: a mapping with batch_size, micro_batches, epochs"),
        ({"data": "\0"}, r"data: path is '\\x00'; no file can have the character NUL in its path: remove it"),
        ({"run": "a\0"}, r"run: path is 'a\\x00'; no file can have the character NUL"),
        ({"memory": {"ssd": "\0"}}, r"memory\.ssd: path is '\\x00'; no file"),
        ({"memory": {"file": "\ud800"}}, r"memory\.file: path is '\\ud800'; it must be valid Unicode"),
        ({"model": {"top_mlp": [8, 0]}}, r"model\.top_mlp is 0; allowed: a list of integers >= 1"),
        (
            {"model": {"history_steps": 8}},
            r"unknown key model\.history_steps for model dlrm; it is one of tbsm: remove it, or set model\.name to t",
        ),
        ({"model": {"name": "dlmr"}}, r"model\.name is 'dlmr'; did you mean 'dlrm'\? allowed: dlrm, tbsm"),
        ({"model": "dlrm"}, "model is 'dlrm'; allowed: a mapping with name, embedding_dim, "),
        (
            {"model": {"embedding_dim": {"t": 8, "user": 0}}},
            r"model\.embedding_dim\.user is 0; allowed: an integer >= 1 and <= 65536$",
        ),
        ({"model": {"name": "tbsm", "top_mlp": []}}, r"model: top_mlp is \[\], but with tbsm its last"),
        ({"device": "gpu"}, "device is 'gpu'; allowed: auto, cpu, cuda"),
        ({"memory": {"hbm": "0"}}, "memory: hbm is '0'; it must be a positive number of bytes"),
        (
            {"memory": "ssd"},
            "memory is 'ssd'; allowed: auto, dram or a mapping with hbm, dram, ssd, file, file_bytes, writes, ",
        ),
        ({"memory": {"dram": "2 foo"}}, "memory: dram '2 foo' is not understood; write a number and a unit"),
        (
            {"memory": {"write_budget": "200GB"}},
            "memory: write_budget: rate '200GB' is not understood; write bytes per day or hour, such as 200GB/day",
        ),
        ({"memory": {"ssd": "a", "file": "b"}}, "memory: ssd is 'a' and file is 'b'; name one of them"),
        ({"parallel": {"exchange": {"user": "row"}}}, r"parallel\.exchange\.user is 'row'; allowed: rows, p"),
        ({"optimizer": {"dense": {"lr": float("nan")}}}, r"optimizer\.dense\.lr is nan; allowed: .* > 0"),
        (
            {"optimizer": {"sparse": {"name": "adagrad", "l2": 0.1}}},
            r"optimizer\.sparse: l2 is 0\.1, but adagrad has no such option",
        ),
        (
            {"model": {"objective": "squared_error"}, "train": {"pos_weight": 3}},
            r"train\.pos_weight is 3\.0, but model\.objective squared_error has no such option; set it to 1\.0",
        ),
        ({"optimizer": {"schedule": {"decay_start_step": 9}}}, "decay_start_step is 9, but decay_steps"),
        (
            {"optimizer": {"schedule": {"decay_start_step": 9, "decay_steps": 5, "warmup_steps": 10}}},
            "decay_start_step is 9, before the warm-up ends at step 10",
        ),
        ({"train": {"eval_every": 2.5}}, r"train\.eval_every is 2\.5; it is a share of an epoch up to 1"),
        ({"train": {"early_stopping": 1, "eval_every": None}}, r"train\.eval_every is null, but early"),
    ],
)
def test_refused_with_field_value_and_allowed(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: .*{message}"):
        make_config({"data": "d"} | raw)


def test_every_wrong_field_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"^config: .*data is missing; set it to text"):
        make_config({})
    with pytest.raises(ValueError, match="device is 'tpu'") as error:
        make_config({"data": "d", "device": "tpu", "train": {"seed": -1}})
    assert "train.seed is -1" in str(error.value)


def test_overrides_are_yaml_and_reach_into_sections(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("data: d\ntrain: {batch_size: 64}\n")
    changes = ["train.epochs=3", "model.top_mlp=[8, 4]", "optimizer.sparse.lr=1e-3", "run=null", "train.batch_size=32"]
    config = load_config(path, changes)
    assert (config.train.epochs, config.train.batch_size, config.model.top_mlp) == (3, 32, [8, 4])
    assert config.optimizer.sparse.lr == 1e-3


@looped(("own", "other"), [*product(MODELS, MODELS)])
def test_the_name_of_a_model_is_enough(own: str, other: str, tmp_path: Path) -> None:
    """A recipe that states every option of one model trains any other, which keeps the options that both have."""
    stated = make_config({"data": "d", "model": {"name": own, "embedding_dim": 9}})
    (tmp_path / "recipe.yaml").write_text(stated.to_yaml())
    lost = {*MODELS[own].model_fields.keys() - MODELS[other].model_fields.keys()}
    lost |= set() if MODELS[other].fits(stated.model.objective) else {"objective"}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = load_config(tmp_path / "recipe.yaml", [f"model.name={other}"])
    kept = stated.model.model_dump(exclude={"name", *lost})
    assert found == stated.model_copy(update={"model": MODELS[other].model_validate(kept)})
    assert {word for one in told for word in re.findall(r"model\.(\w+)", str(one.message))} == lost
    assert len(told) == bool(lost)


def test_only_what_the_recipe_says_is_left_out(tmp_path: Path) -> None:
    path, changes = tmp_path / "c.yaml", ["model.bottom_mlp=[4]", "model.name=dcn"]
    path.write_text("data: d\nmodel: {bottom_mlp: [8]}\n")
    with pytest.warns(UserWarning, match=r"model\.bottom_mlp"), pytest.raises(ValueError, match="one of dlrm and tbsm"):
        load_config(path, changes)
    path.write_text("data: d\nmodel: {botom_mlp: [8]}\n")
    with pytest.raises(ValueError, match=r"model\.botom_mlp"):
        load_config(path, changes[1:])
    for name in ("dcm", "[dcn]", "null"):
        with pytest.raises(ValueError, match=r"model\.name"):
            load_config(path, [f"model.name={name}"])


def test_an_override_goes_below_the_word_for_memory() -> None:
    changes = ["memory.dram=2GiB", "memory.lookahead=0"]
    config = make_config(apply_overrides({"data": "d", "memory": "auto"}, changes))
    assert (config.memory.dram_bytes, config.memory.lookahead) == (2 << 30, 0)  # type: ignore[union-attr]
    assert make_config(parse_yaml(config.to_yaml(), origin="")) == config
    assert make_config(apply_overrides(config.model_dump(), ["memory=dram"])).memory == "dram"


def test_overrides_leave_the_dict_they_start_from() -> None:
    raw = {"train": {"epochs": 1}}
    assert apply_overrides(raw, ["train.epochs=2"]) == {"train": {"epochs": 2}}
    assert raw == {"train": {"epochs": 1}}


@looped(
    ("override", "message"),
    [
        ("train.epochs", "no name and value; write it as --set train.batch_size=4096"),
        ("data.x=3", "data holds 'd', which has no fields"),
        ("train.epochs=[1", r"--set train\.epochs line 1"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_overrides({"data": "d"}, [override])


@looped(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f line 3, column 1: key 'a' is given twice"),
        ("a: !!python/object/apply:os.system ['true']", "f line 1, column 4: could not determine a constructor"),
        ("[" * 600, "f is nested too deeply"),
        ("{? {a: 1} : 2}", "is not a name"),
        ("a: \x00", "f is not readable as YAML: .*special characters are not allowed"),
    ],
)
def test_hostile_yaml(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_yaml(text, origin="f")


def test_numbers_with_an_exponent_are_numbers() -> None:
    assert parse_yaml("[1e-3, 2E5, -1e+2, 1.5e3]", origin="") == [1e-3, 2e5, -1e2, 1.5e3]


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none.yaml: No such file or directory; pass a YAML file such as recipes/"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match=r"'config a\\x00.yaml': embedded null byte; pass a YAML file"):
        load_config("a\0.yaml")
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(ValueError, match="holds None; it must be a mapping"):
        load_config(tmp_path / "empty.yaml")


def test_a_config_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes("data: é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"config .*c\.yaml: byte 6 is not UTF-8"):
        load_config(path)
    path.write_bytes(b"\xef\xbb\xbfdata: x")
    assert load_config(path).data == "x"


def test_interval_steps() -> None:
    assert interval_steps(None, steps_per_epoch=100) is None
    assert interval_steps(0.1, steps_per_epoch=95) == 9.5
    assert interval_steps(1.0, steps_per_epoch=95) == 95
    assert interval_steps(0.001, steps_per_epoch=95) == 1
    assert interval_steps(500, steps_per_epoch=95) == 500


@looped("share", [0.01, 0.1, 0.25, 1 / 3, 0.5, 1.0])
@looped("steps", [1, 7, 30, 95, 1005])
def test_shares_of_an_epoch_come_evenly_and_at_its_end(share: float, steps: int) -> None:
    every = interval_steps(share, steps_per_epoch=steps)
    due = [step for step in range(1, 3 * steps + 1) if is_due(step, every)]
    assert len(due) == 3 * min(steps, round(1 / share))
    assert {steps, 2 * steps, 3 * steps} <= set(due)


def test_steps_between_events() -> None:
    assert [step for step in range(1, 13) if is_due(step, 5)] == [5, 10]
    assert not any(is_due(step, None) for step in range(1, 13))


def test_the_write_budget_in_numbers() -> None:
    config = make_config({"data": "d", "memory": {"write_budget": "200 GB/day"}})
    assert config.write_budget == (200 * 10**9, 86_400, "200 GB/day")
    assert make_config({"data": "d"}).write_budget is None
    assert make_config({"data": "d", "memory": {}}).write_budget is None


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi"))
"""Nine lines that stand for 86 million values."""


@looped(
    ("text", "message"),
    [
        ("1: x", "line 1, column 1: key 1 is read as a number, not as a name; put it in quotes"),
        ("data: d\nnull: x", "line 2, column 1: key None is read as null"),
        ("2001-01-01: x", "is read as date, not as a name"),
        ("data: 2001-13-45", "a value cannot be read .*put it in quotes if it is text"),
        ("data: &a [*a]", "line 1, column 7: a value contains itself; remove the alias"),
        (BOMB, "line 6, column 4: more than 100,000 values, aliases counted as what they stand for; write fewer"),
    ],
)
def test_odd_yaml_is_named_by_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / "c.yaml")
