"""What a guessed schema costs beside one that a person tells: AUC and LogLoss of both, on public files.

    python -m benchmarks.guesses FOLDER [--files NAME...] [--seeds 3] [--out guesses.json]

FOLDER holds the files that benchmarks/guesses.yaml lists, which says where each is from. Every file is trained with the
columns that hotrow guesses, and with those that the list tells, on the same rows, several seeds each. A copy of it with
rows and columns in another order and other names is guessed too: if its kinds differ, it is trained as well, and the
difference stands beside its standard error. A guess is close if it is at most AUC below and LogLoss above what is told.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars
import yaml

import hotrow
from hotrow.data.prepare.init import run_init

LIST = Path(__file__).with_name("guesses.yaml")
AUC, LOGLOSS = 0.003, 0.01
"""How far a guess may be below the told AUC, and above the told LogLoss in parts of it."""
WORST_AUC = 0.02


def guessed_roles(path: Path, told: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the roles of every column of a file that hotrow uses, by the schema that `hotrow init` writes."""
    schema = yaml.safe_load(run_init(str(path), label=told["label"], time=told.get("time")).schema or "")
    roles: dict[str, list[str]] = {}
    for role in ("dense", "categorical"):
        for column in schema.get(role, ()):
            roles.setdefault(column["column"], []).append(role)
    return {name: sorted(set(own)) for name, own in roles.items()}


def trained(path: Path, told: Mapping[str, Any], folder: Path, seed: int, *, as_told: bool) -> dict[str, float]:
    """Trains on a file and returns AUC and LogLoss of its test rows. as_told: by the list, instead of by a guess."""
    roles = {name: told.get(name, []) for name in ("categorical", "dense", "exclude")} if as_told else {}
    run = hotrow.fit(
        str(path),
        label=told["label"],
        time=told.get("time"),
        skip_bad_rows=1000,
        run=folder / f"{path.stem}-{'told' if as_told else 'guessed'}-{seed}",
        quiet=True,
        **{"train.seed": seed},
        **roles,
    )
    return {"auc": run.metrics["auc"], "logloss": run.metrics["logloss"]}


def permuted(path: Path, told: Mapping[str, Any], folder: Path) -> tuple[Path, dict[str, Any], dict[str, str]]:
    """Writes a copy with rows and columns in another order and other names; returns it, what is told of it, and the
    old name of every new one."""
    frame = polars.read_csv(path, infer_schema=False).sample(fraction=1.0, shuffle=True, seed=7)
    order = sorted(frame.columns, key=hash_of)
    names = {name: f"c{place}" for place, name in enumerate(order)}
    copy = folder / f"{path.stem}-permuted.csv"
    frame.select(order).rename(names).write_csv(copy)
    label, *rule = told["label"].split(" ", 1)
    renamed = {"label": " ".join([names[label], *rule])}
    return copy, renamed | ({"time": names[told["time"]]} if "time" in told else {}), {n: o for o, n in names.items()}


def hash_of(name: str) -> int:
    """Returns the place of a column in the other order."""
    return sum((place + 1) * ord(char) * 2654435761 for place, char in enumerate(name)) % 1_000_003


def cell(path: Path, told: Mapping[str, Any], seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    """Returns the figures of one file."""
    start = time.perf_counter()
    roles = guessed_roles(path, told)
    guess_s = time.perf_counter() - start
    copy, renamed, old = permuted(path, told, folder)
    other = {old[name]: own for name, own in guessed_roles(copy, renamed).items()}
    changed = sorted(name for name in roles.keys() | other.keys() if roles.get(name) != other.get(name))
    by_hand = {name: [role for role in ("categorical", "dense") if name in told.get(role, ())] for name in old.values()}
    found: dict[str, Any] = {"file": path.name, "guess_s": guess_s, "changed_by_permuting": changed}
    found["unlike_told"] = {
        name: f"{'+'.join(roles.get(name, ['left out']))}, told {'+'.join(own) or 'left out'}"
        for name, own in by_hand.items()
        if roles.get(name, []) != own and name not in (told["label"].split(" ")[0], told.get("time"))
    }
    found["guessed"] = [trained(path, told, folder, seed, as_told=False) for seed in seeds]
    found["told"] = [trained(path, told, folder, seed, as_told=True) for seed in seeds]
    if changed:
        found["permuted"] = [trained(copy, renamed, folder, seed, as_told=False) for seed in seeds]
    for name in ("auc", "logloss"):
        found[f"{name}_guessed"], found[f"{name}_told"] = (
            statistics.fmean(one[name] for one in found[which]) for which in ("guessed", "told")
        )
    below, above = found["auc_told"] - found["auc_guessed"], found["logloss_guessed"] / found["logloss_told"] - 1
    return found | {"auc_below": below, "logloss_above": above, "close": below <= AUC and above <= LOGLOSS}


def line_of(found: Mapping[str, Any]) -> str:
    text = (
        f"{found['file']:28} {found['auc_guessed']:.4f} / {found['logloss_guessed']:.4f}  "
        f"{found['auc_told']:.4f} / {found['logloss_told']:.4f}  "
        f"{-found['auc_below']:+.4f} {found['logloss_above']:+7.2%}"
    )
    text += "" if found["close"] else "  NOT CLOSE"
    if found["changed_by_permuting"]:
        gap = statistics.fmean(one["auc"] for one in found["permuted"]) - found["auc_guessed"]
        text += f"  permuted: {', '.join(found['changed_by_permuting'])} differ, AUC {gap:+.4f}"
        if len(found["guessed"]) > 1:
            both = [statistics.variance(one["auc"] for one in found[which]) for which in ("guessed", "permuted")]
            text += f" ± {math.sqrt(sum(both) / len(found['guessed'])):.4f}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", nargs="*", help="only these files")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    given = parser.parse_args()
    every = [
        one for one in yaml.safe_load(LIST.read_text(encoding="utf-8")) if not given.files or one["file"] in given.files
    ]
    if missing := [one["file"] for one in every if not (given.folder / one["file"]).exists()]:
        parser.error(f"{given.folder} lacks {', '.join(missing)}: {LIST.name} says where they are from")
    cells = []
    print(f"{'file':28} {'guessed: AUC / LogLoss':17} {'told':17} difference", flush=True)
    for told in every:
        with tempfile.TemporaryDirectory(prefix="hotrow-guesses-") as folder:
            cells.append(cell(given.folder / told["file"], told, range(1, given.seeds + 1), Path(folder)))
        print(line_of(cells[-1]), flush=True)
        for name, why in cells[-1]["unlike_told"].items():
            print(f"    {name}: {why}", flush=True)
    close, worst = sum(one["close"] for one in cells), max(one["auc_below"] for one in cells)
    print(f"{close} of {len(cells)} files are close; the worst AUC is {worst:.4f} below what is told")
    if given.out:
        given.out.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    return 0 if worst <= WORST_AUC else 1


if __name__ == "__main__":
    sys.exit(main())
