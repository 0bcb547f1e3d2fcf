"""The config schema: what is accepted, what is refused and with which words, and that docs/config.md says the same."""

from __future__ import annotations

import re
import runpy
import warnings
from itertools import pairwise, product
from pathlib import Path

import pytest
from pydantic import BaseModel

from hotrow.config.load import (
    apply_overrides,
    load_config,
    make_config,
    options_of,
    parse_yaml,
    sections,
)
from hotrow.config.schema import interval_steps, is_due
from hotrow.models import MODELS
from loops import looped

ROOT = Path(__file__).resolve().parents[2]
PAGE = runpy.run_path(str(ROOT / "scripts" / "config_page.py"))

# Every public option. An addition, a removal or a new default shows up here as a diff.
PUBLIC_OPTIONS = """
data
device auto
memory auto
from_run None
run None
optimizer.dense.name sgd
optimizer.dense.lr 0.1
optimizer.dense.weight_decay None
optimizer.sparse.name row_wise_adagrad
optimizer.sparse.lr 0.05
optimizer.sparse.initial_accumulator_value None
optimizer.sparse.l1 None
optimizer.sparse.l2 None
optimizer.schedule.warmup_steps 0
optimizer.schedule.decay_start_step None
optimizer.schedule.decay_steps 0
train.batch_size 2048
train.micro_batches None
train.epochs 1
train.max_steps None
train.shuffle True
train.eval_every 1.0
train.early_stopping None
train.monitor None
train.seed 1
train.threads auto
train.precision fp32
train.dense_dtype fp32
train.pos_weight 1.0
train.clip_norm None
train.ema None
train.freeze []
train.nonfinite raise
train.log_every 50
metrics.by None
calibration.method None
calibration.negatives_kept 1.0
checkpoint.every None
checkpoint.keep_last 2
memory.hbm None
memory.dram auto
memory.ssd None
memory.file None
memory.file_bytes None
memory.writes auto
memory.lookahead 4
memory.force False
memory.write_budget None
hot.schedule none
hot.budget 512MiB
hot.small_table 1MiB
hot.rows exact
hot.rate 50
hot.window 4
hot.merge_every 1
parallel.sharding auto
parallel.hot_rows 0
parallel.exchange auto
parallel.wire_dtype fp32
"""
OPTIONS_OF_EVERY_MODEL = """
embedding_dim 16
embedding_init None
"""
OPTIONS_OF_MODELS = {
    "dlrm": """
dropout 0.0
bottom_mlp [512, 256, 64]
top_mlp [512, 256]
concatenated False
first_order False
members 1
embedding_dropout 0.0
""",
    "tbsm": """
dropout 0.0
bottom_mlp [512, 256, 64]
top_mlp [512, 256]
history_steps 20
attention_mlp [15, 15]
final_mlp [60]
""",
    "dcn": """
dropout 0.0
num_cross_layers 3
low_rank None
deep_mlp [512, 256]
structure parallel
""",
    "deepfm": """
dropout 0.0
second_order True
deep_mlp [400, 400, 400]
""",
    "din": """
dropout 0.0
attention_mlp [80, 40]
top_mlp [200, 80]
""",
    "two_tower": """
dropout 0.0
item ['item']
user None
dense_inputs user
tower_mlp [256]
vector_dim 64
temperature 0.05
""",
    "finalmlp": """
dropout 0.0
first_mlp [400, 400, 400]
second_mlp [800]
""",
    "mmoe": """
dropout 0.0
experts 4
expert_mlp [512, 256]
tower_mlp [128]
""",
}


def listed(section: type[BaseModel], path: str = "") -> list[str]:
    options = options_of(section).items()
    return [f"{path}{name}" + ("" if field.is_required() else f" {field.default}") for name, field in options]


def test_public_options() -> None:
    found = [line for title, path, section in sections() if path != "model." for line in listed(section, path)]
    assert found == PUBLIC_OPTIONS.split("\n")[1:-1]


@pytest.mark.parametrize("model", MODELS)
def test_public_options_of_models(model: str) -> None:
    assert listed(MODELS[model]) == [
        f"name {model}",
        *OPTIONS_OF_EVERY_MODEL.split("\n")[1:-1],
        f"objective {'sampled_softmax' if model == 'two_tower' else 'binary_cross_entropy'}",
        *OPTIONS_OF_MODELS[model].split("\n")[1:-1],
    ]


def test_every_option_is_documented() -> None:
    for _, path, section in sections():
        effects = PAGE["effects_of"](section)
        for name, field in options_of(section).items():
            assert field.description or effects[name], path + name


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


def test_yaml_round_trip() -> None:
    config = make_config({"data": "d", "train": {"eval_every": 0.1, "early_stopping": 3}, "model": {"top_mlp": []}})
    assert make_config(parse_yaml(config.to_yaml(), origin="")) == config


@looped(
    ("raw", "message"),
    [
        ({}, "data is missing; set it to text"),
        ({"data": "d", "trian": {}}, "unknown key trian; did you mean 'train'?"),
        ({"data": "d", "train": {"batchsize": 1}}, r"unknown key train\.batchsize; did you mean 'batch_size'?"),
        ({"data": "d", "": 1}, r"unknown key ''; known here: data, "),
        ({"data": "d", "train": {"zzz": 1}}, r"unknown key train\.zzz; known here: batch_size, "),
        ({"data": "d", "train": {"batch_size": 0}}, r"train\.batch_size is 0; allowed: an integer >= 1"),
        ({"data": "d", "train": {"batch_size": "64"}}, r"train\.batch_size is '64'; allowed: an integer >= 1"),
        ({"data": "d", "train": {"batch_size": 64.0}}, r"train\.batch_size is 64\.0; allowed: an integer"),
        ({"data": "d", "train": {"threads": "many"}}, r"train\.threads is 'many'; allowed: auto or an integer >= 1"),
        ({"data": "d", "train": 3}, "train is 3; allowed: a mapping with batch_size, micro_batches, epochs"),
        ({"data": "\0"}, r"data: path is '\\x00'; no file can have the character NUL in its path: remove it"),
        ({"data": "d", "run": "a\0"}, r"run: path is 'a\\x00'; no file can have the character NUL"),
        ({"data": "d", "memory": {"ssd": "\0"}}, r"memory\.ssd: path is '\\x00'; no file"),
        ({"data": "d", "memory": {"file": "\ud800"}}, r"memory\.file: path is '\\ud800'; it must be valid Unicode"),
        ({"data": "d", "model": {"top_mlp": [8, 0]}}, r"model\.top_mlp is 0; allowed: a list of integers >= 1"),
        (
            {"data": "d", "model": {"history_steps": 8}},
            r"unknown key model\.history_steps for model dlrm; it is one of tbsm: remove it, or set model\.name to t",
        ),
        (
            {"data": "d", "model": {"name": "tbsm", "first_order": True}},
            r"unknown key model\.first_order for model tbsm; it is one of dlrm: remove it, or set model\.name to dlrm",
        ),
        (
            {"data": "d", "model": {"botom_mlp": [8]}},
            r"unknown key model\.botom_mlp for model dlrm; did you mean 'bottom_mlp'?",
        ),
        (
            {"data": "d", "model": {"zzz": 8}},
            r"unknown key model\.zzz for model dlrm; known here: name, embed",
        ),
        ({"data": "d", "model": {"name": "dlmr"}}, r"model\.name is 'dlmr'; did you mean 'dlrm'\? allowed: dlrm, tbsm"),
        ({"data": "d", "model": {"name": 3}}, r"model\.name is 3; allowed: dlrm, tbsm"),
        ({"data": "d", "model": "dlrm"}, "model is 'dlrm'; allowed: a mapping with name, embedding_dim, "),
        (
            {"data": "d", "model": {"embedding_dim": {"t": 8, "user": 0}}},
            r"model\.embedding_dim\.user is 0; allowed: an integer >= 1 and <= 65536$",
        ),
        (
            {"data": "d", "model": {"name": "dcn", "embedding_dim": {"a": "x", "": -1}}},
            r"model\.embedding_dim\.a is 'x'; allowed: an integer .*; model\.embedding_dim\.'' is -1; allowed: an ",
        ),
        (
            {"data": "d", "model": {"embedding_dim": {3: 8}}},
            r"model\.embedding_dim is 3; allowed: an integer .* or a mapping from names to integers",
        ),
        (
            {"data": "d", "model": {"embedding_dim": "8"}},
            r"model\.embedding_dim is '8'; allowed: an integer >= 1 and <= 65536 or a mapping from names to integers",
        ),
        ({"data": "d", "model": {"name": "tbsm", "top_mlp": []}}, r"model: top_mlp is \[\], but with tbsm its last"),
        (
            {"data": "d", "model": {"name": "tbsm", "history_steps": 0}},
            r"model\.history_steps is 0; allowed: an integer >= 1",
        ),
        ({"data": "d", "train": {"precision": "bf16"}}, r"train\.precision is 'bf16'; allowed: fp32, fp16, split_bf16"),
        ({"data": "d", "device": "gpu"}, "device is 'gpu'; allowed: auto, cpu, cuda"),
        ({"data": "d", "memory": {"hbm": "0"}}, "memory: hbm is '0'; it must be a positive number of bytes"),
        (
            {"data": "d", "memory": "ssd"},
            "memory is 'ssd'; allowed: auto, dram or a mapping with hbm, dram, ssd, file, file_bytes, writes, ",
        ),
        ({"data": "d", "memory": 3}, "memory is 3; allowed: auto, dram or a mapping with hbm, dram, "),
        ({"data": "d", "memory": {"dran": "2GiB"}}, r"unknown key memory\.dran; did you mean 'dram'?"),
        (
            {"data": "d", "memory": {"dram": "2 foo"}},
            "memory: dram '2 foo' is not understood; write a number and a unit",
        ),
        ({"data": "d", "memory": {"dram": 0}}, "memory: dram is 0; it must be a positive number of bytes"),
        (
            {"data": "d", "memory": {"write_budget": "200GB"}},
            "memory: write_budget: rate '200GB' is not understood; write bytes per day or hour, such as 200GB/day",
        ),
        ({"data": "d", "memory": {"write_budget": 5}}, r"memory\.write_budget is 5; allowed: text or null"),
        ({"data": "d", "memory": {"ssd": "a", "file": "b"}}, "memory: ssd is 'a' and file is 'b'; name one of them"),
        ({"data": "d", "memory": {"policy": "lru"}}, r"unknown key memory\.policy"),
        ({"data": "d", "memory": {"lookahead": -1}}, r"memory\.lookahead is -1; allowed: an integer >= 0"),
        ({"data": "d", "hot": {"schedule": "lru"}}, r"hot\.schedule is 'lru'; allowed: none, fae, fixed, window"),
        ({"data": "d", "hot": {"rate": 0.5}}, r"hot\.rate is 0\.5; allowed: a number >= 1 and <= 100"),
        ({"data": "d", "hot": {"budget": "much"}}, "hot: budget: size 'much' is not understood"),
        ({"data": "d", "hot": {"budget": 0}}, "hot: budget is 0; it must be a positive number of bytes"),
        ({"data": "d", "hot": {"small_table": -1}}, "hot: small_table is -1; it must be a positive number of bytes"),
        (
            {"data": "d", "parallel": {"exchange": {"user": "row"}}},
            r"parallel\.exchange\.user is 'row'; allowed: rows, p",
        ),
        ({"data": "d", "parallel": {"wire_dtype": "fp8"}}, r"parallel\.wire_dtype is 'fp8'; allowed: fp32, bf16, fp16"),
        (
            {"data": "d", "parallel": {"sharding": {"user": "rows"}}},
            r"parallel\.sharding\.user is 'rows'; allowed: replicated, table, row, column",
        ),
        ({"data": "d", "optimizer": {"dense": {"lr": float("nan")}}}, r"optimizer\.dense\.lr is nan; allowed: .* > 0"),
        (
            {"data": "d", "optimizer": {"sparse": {"name": "sgd", "l2": 0.1}}},
            r"optimizer\.sparse: l2 is 0\.1, but sgd has no such option",
        ),
        (
            {"data": "d", "model": {"objective": "squared_error"}, "train": {"pos_weight": 3}},
            r"train\.pos_weight is 3\.0, but model\.objective squared_error has no such option; set it to 1\.0",
        ),
        ({"data": "d", "train": {"pos_weight": 0}}, r"train\.pos_weight"),
        ({"data": "d", "train": {"clip_norm": 0}}, r"train\.clip_norm"),
        ({"data": "d", "train": {"ema": 1}}, r"train\.ema is 1; allowed: a number > 0 and < 1 or null"),
        (
            {"data": "d", "train": {"ema": 0.9, "precision": "split_bf16"}},
            r"train\.ema is 0\.9, but with .* set train\.ema to null, or choose another optimizer\.dense\.name",
        ),
        ({"data": "d", "optimizer": {"schedule": {"decay_start_step": 9}}}, "decay_start_step is 9, but decay_steps"),
        (
            {"data": "d", "optimizer": {"schedule": {"decay_start_step": 9, "decay_steps": 5, "warmup_steps": 10}}},
            "decay_start_step is 9, before the warm-up ends at step 10",
        ),
        ({"data": "d", "train": {"eval_every": 2.5}}, r"train\.eval_every is 2\.5; it is a share of an epoch up to 1"),
        ({"data": "d", "train": {"early_stopping": 1, "eval_every": None}}, r"train\.eval_every is null, but early"),
    ],
)
def test_refused_with_field_value_and_allowed(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^config: .*{message}"):
        make_config(raw)


def test_every_wrong_field_is_named_at_once() -> None:
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs", "no name and value; write it as --set train.batch_size=4096"),
        ("=3", "no name and value"),
        ("data.x=3", "data holds 'd', which has no fields"),
        ("train.epochs=[1", r"--set train\.epochs line 1"),
    ],
)
def test_bad_overrides(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_overrides({"data": "d"}, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f line 3, column 1: key 'a' is given twice"),
        ("a: [1\n", "f line 2"),
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1: x", "line 1, column 1: key 1 is read as a number, not as a name; put it in quotes"),
        ("data: d\nnull: x", "line 2, column 1: key None is read as null"),
        ("data: d\ntrain: {true: 1}", "key True is read as true or false"),
        ("data: d\n1.5: x", "key 1.5 is read as a number"),
        ("2001-01-01: x", "is read as date, not as a name"),
        ("data: 2001-13-45", "a value cannot be read .*put it in quotes if it is text"),
        ("data: &a [*a]", "line 1, column 7: a value contains itself; remove the alias"),
        (BOMB, "line 6, column 4: more than 100,000 values, aliases counted as what they stand for; write fewer"),
        ("data: !!python/object:os.system x", "could not determine a constructor"),
    ],
)
def test_odd_yaml_is_named_by_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(tmp_path / "c.yaml")
