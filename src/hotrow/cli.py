"""The command line: each verb is a library call and the printing of its result.

Results go to stdout (one JSON object as its last line with --json), progress to stderr. Bad input ends with exit code 2
and one line that says the cure; HOTROW_DEBUG=1 shows the traceback. Interrupted training ends with 128 + the signal.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Raw click logs in, a trained DLRM out. Start with `hotrow demo`; every verb has --help with an example.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a config field, e.g. train.epochs=2.")]
Paths = Annotated[list[str], typer.Argument(help="Files, folders, globs or URIs (s3://, gs://, hdfs://).")]
Label = Annotated[str | None, typer.Option(help="The 0/1 column; guessed if not given.")]
Time = Annotated[str | None, typer.Option(help="The column to split by time; guessed if not given.")]


def example(text: str) -> dict[str, str]:
    """The epilog of a verb's help."""
    return {"epilog": f"Example: {text}"}


def print_result(result: Mapping[str, Any], *, as_json: bool, human: Callable[[], None]) -> None:
    """`result` as one line of JSON, or what `human` prints."""
    if as_json:
        print(json.dumps(result, allow_nan=False))
    else:
        human()


@app.command(**example("hotrow demo   (your own logs: hotrow demo --data clicks.csv --label click)"))
def demo(
    data: Annotated[str | None, typer.Option(help="Your own logs instead of synthetic ones: CSV or Parquet.")] = None,
    label: Label = None,
    time: Time = None,
    folder: Annotated[Path, typer.Option(help="Where synthetic logs and their packed form are kept.")] = Path("demo-data"),
    json_: Json = False,
) -> None:
    """Make synthetic Criteo-shaped clicks (or take your own logs), prepare, train a DLRM, evaluate it."""
    from hotrow.demo import demo_on_logs, demo_on_synthetic

    result = demo_on_logs(data, label=label, time=time) if data else demo_on_synthetic(folder)
    print_result(result, as_json=json_, human=lambda: print(result["text"]))
    _exit_if_interrupted(result)


@app.command(**example("hotrow train recipes/criteo-small.yaml --set train.seed=2   (go on: hotrow train --resume RUN)"))
def train(
    config: Annotated[Path | None, typer.Argument(help="A YAML config, e.g. recipes/criteo-small.yaml.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder to the same bits.")] = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Train as a config says, or continue an interrupted run."""
    from hotrow import trainer
    from hotrow.api import Run
    from hotrow.config import load_config

    if (config is None) == (resume is None):
        raise ValueError("pass a config to start a run, or --resume RUN to continue one")
    if resume is not None:
        folder = trainer.resume(resume, set_ or ())
    else:
        assert config is not None
        folder = trainer.train(load_config(config, set_ or ()))
    result = Run(folder.path).summary()
    print_result(result, as_json=json_, human=lambda: _print_run(result))
    _exit_if_interrupted(result)


@app.command("eval", **example("hotrow eval runs/criteo-small-dlrm-001 --split test"))
def eval_(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    data: Annotated[Path | None, typer.Option(help="A packed dataset; default: the run's own.")] = None,
    split: Annotated[str, typer.Option(help="Which split of it.")] = "test",
    json_: Json = False,
) -> None:
    """AUC, LogLoss, normalised entropy and calibration of a run on a split."""
    from hotrow.api import load

    result = {"run_dir": str(run), "split": split, **load(run).evaluate(split, data=data)}
    print_result(result, as_json=json_, human=lambda: _print_fields(result))


@app.command(**example("hotrow predict runs/clicks-dlrm-001 new/*.parquet --out scores.parquet"))
def predict(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    paths: Paths,
    out: Annotated[Path, typer.Option(help="File of scores, .parquet or .csv; must not exist yet.")],
    json_: Json = False,
) -> None:
    """Score raw rows: one probability per row, in the rows' order, in column `score`."""
    from hotrow.api import load

    result = {"run_dir": str(run), "out": str(out), "rows": load(run).write_scores(paths, out)}
    print_result(result, as_json=json_, human=lambda: _print_fields(result))


@app.command(**example("hotrow inspect data/criteo"))
def inspect(path: Annotated[Path, typer.Argument(help="A packed dataset.")], json_: Json = False) -> None:
    """Rows, table sizes, and how few rows take most accesses."""
    from hotrow import tools

    result = tools.inspect(path)
    print_result(result, as_json=json_, human=lambda: _print_inspection(result))


@app.command(**example("hotrow check data/criteo"))
def check(
    path: Annotated[Path, typer.Argument(help="A packed dataset, a checkpoint or a run.")], json_: Json = False
) -> None:
    """Verify every byte of a packed dataset, a checkpoint or a run against its checksums."""
    from hotrow import tools

    result = tools.check(path)
    print_result(result, as_json=json_, human=lambda: _print_fields(result))


@app.command(**example("hotrow bench --quick"))
def bench(
    names: Annotated[list[str] | None, typer.Argument(help="Cells to measure; default: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller shapes, fewer rounds.")] = False,
    json_: Json = False,
) -> None:
    """Our kernels against torch's and the machine's limit, interleaved, outputs compared first."""
    from hotrow.bench import format_row, run_bench

    result = run_bench(names or None, quick=quick)
    print_result(result, as_json=json_, human=lambda: print("\n".join(format_row(row) for row in result["cells"])))


@app.command(**example("hotrow doctor"))
def doctor(json_: Json = False) -> None:
    """What decides whether and how fast hotrow runs here; paste it into reports."""
    from hotrow import tools

    result = tools.doctor()
    print_result(result, as_json=json_, human=lambda: _print_fields(result))


@app.command(**example("hotrow clean runs/criteo-dlrm-001"))
def clean(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    data: Annotated[bool, typer.Option("--data", help="Also data that was packed into the run's folder.")] = False,
    json_: Json = False,
) -> None:
    """Remove a run's checkpoints but the newest and the chosen one."""
    from hotrow import tools

    result = tools.clean(run, data=data)
    print_result(result, as_json=json_, human=lambda: _print_fields(result))


def _exit_if_interrupted(result: Mapping[str, Any]) -> None:
    if result.get("status") == "interrupted":
        raise typer.Exit(128 + result["signal"])


def _print_run(result: Mapping[str, Any]) -> None:
    if result["status"] == "finished":
        _print_fields({name: value for name, value in result.items() if name not in ("metrics", "status")})


def _print_fields(fields: Mapping[str, Any], indent: str = "") -> None:
    width = max((len(name) for name in fields), default=0)
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            print(f"{indent}{name}")
            _print_fields(value, indent + "  ")
        else:
            print(f"{indent}{name:<{width}}  {_short(value)}")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return ", ".join(_short(item) for item in value) if isinstance(value, list) else str(value)


def _print_inspection(result: Mapping[str, Any]) -> None:
    table = Table("table", "rows", "ids dropped", "accesses", "rare", "top 1 %", "top 10 %", title=result["path"])
    for row in result["tables"]:
        shares = (f"{row[name]:.1%}" for name in ("rare", "top_1%", "top_10%"))
        table.add_row(row["table"], *(f"{row[n]:,}" for n in ("num_embeddings", "num_dropped", "accesses")), *shares)
    Console().print(table)
    _print_fields({name: result[name] for name in ("rows", "num_embeddings", "accesses", "coverage", "checksum")})


def main() -> None:
    """The `hotrow` command."""
    warnings.showwarning = _one_line_warning
    try:
        app()
    except (ValueError, OSError) as error:
        if os.environ.get("HOTROW_DEBUG") == "1":
            traceback.print_exc()
        print(f"hotrow: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as error:
        print(f"hotrow: {error or 'aborted'}", file=sys.stderr)
        sys.exit(130)


def _one_line_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"hotrow: warning: {message}", file=sys.stderr)
