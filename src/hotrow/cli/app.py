"""The command line: each verb calls the library and prints the result.

Results go to stdout (with --json, the last line is one JSON object), progress to stderr. Bad input ends with exit code
2 and one line that says what to do; HOTROW_DEBUG=1 shows the traceback. Interrupted training ends with exit code
128 + the signal, and with 3 if another process of the run was lost (parallel/heartbeat.py).
"""

from __future__ import annotations

import functools
import json
import math
import os
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from importlib import import_module
from inspect import Parameter, signature, unwrap
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, TypeAlias

import typer

from hotrow.base.version import __version__
from hotrow.data.sources.options import NAMES, ReadOptions, spread
from hotrow.parallel.environment import size_variable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Raw click logs in, a trained DLRM out. Start with `hotrow fit FILE`; every verb has --help with an example.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Override a config field, e.g. train.epochs=2.")]
Paths = Annotated[list[str], typer.Argument(help="Files, folders, globs or URIs (s3://, gs://, hdfs://).")]
NOT_OF_A_CONFIG = ("data", "schema", "split", "config", "refit", "choice", "rivals", "quiet", *NAMES)
"""Arguments of `hotrow.fit` that are not config options, so that --set does not take them."""
Split = Annotated[str | None, typer.Option(help="time, random or reference (criteo).")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Refuse a value that is not of its column's kind, naming its row; else it is missing."
    ),
]
SchemaFile = Annotated[
    Path | None, typer.Option("--schema", help="How to read tables (hotrow init writes one); guessed if not given.")
]
Fractions = Annotated[str | None, typer.Option(help="Shares of train, val and test, e.g. 0.8,0.1,0.1.")]
Answer: TypeAlias = Mapping[str, Any] | tuple[Mapping[str, Any], Callable[[], None]]
"""What a verb returns: its result, and what prints it for people; by default each field on a line."""


def verb(name: str, *, home: str, example: str) -> Callable[[Callable[..., Answer]], Callable[..., None]]:
    """Registers a function as the verb `name`, whose help ends with an example.

    The verb gets an option --json, which prints the function's result as one line of JSON. Its exit code is
    128 + the signal if the result says that a run was interrupted.
    home: the module whose functions the verb calls. It imports torch, so it is imported before the verb begins, while
    Ctrl-C still ends the process at once (`__main__`); a KeyboardInterrupt inside torch's C++ ends with a crash report.
    """

    def register(function: Callable[..., Answer]) -> Callable[..., None]:
        plain = signature(function, eval_str=True)
        if reads := "read" in plain.parameters:
            plain = spread(plain, _read_flags())

        @functools.wraps(function)
        def run(*arguments: Any, json_: bool, **options: Any) -> None:
            import_module(home)
            with saying_interruptions():
                _check_processes(name)
                if reads:
                    options["read"] = ReadOptions.taken_from(options)
                answer = function(*arguments, **options)
                result, show = answer if isinstance(answer, tuple) else (answer, None)
                if json_:
                    print(json.dumps(result, allow_nan=False))
                elif show is not None:
                    show()
                else:
                    _print_fields(result)
                if result.get("status") == "interrupted":
                    raise typer.Exit(128 + result["signal"])

        option = Parameter("json_", Parameter.KEYWORD_ONLY, default=False, annotation=Json)
        shown = plain.replace(parameters=[*plain.parameters.values(), option])
        run.__signature__ = shown  # type: ignore[attr-defined]  # typer reads it
        run.__annotations__ = {name: parameter.annotation for name, parameter in shown.parameters.items()}
        return app.command(name, epilog=f"Example: {example}")(run)

    return register


def _read_flags() -> dict[str, Any]:
    """Returns the flag of each of `ReadOptions`, as typer's annotations; flags of lists may be repeated."""
    flags: dict[str, Any] = {}
    for option in fields(ReadOptions):
        kind: Any = {(): list[str] | None, 0: int}.get(option.default, str | None)
        more = " May be repeated." if option.default == () else ""
        flags[option.name] = Annotated[kind, typer.Option(help=option.metadata["help"] + more)]
    return flags


OF_RANKS = ("plan", "train")
"""Verbs that several processes share."""


def _check_processes(name: str) -> None:
    """Raises ValueError if several processes would all do, and write, what one verb does."""
    if name not in OF_RANKS and (variable := size_variable(os.environ)) is not None:
        raise ValueError(
            f"hotrow {name} runs in one process, but {variable} is {os.environ[variable]}: start it without torchrun, "
            f"mpiexec or srun, or unset {variable}"
        )


@contextmanager
def saying_interruptions() -> Iterator[None]:
    """Makes Ctrl-C or SIGTERM inside end with its own message and exit code; typer says only "Aborted."."""
    got = signal.SIGINT

    def terminate(number: int, frame: object) -> None:
        nonlocal got
        got = signal.SIGTERM
        raise KeyboardInterrupt

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():  # only the main thread may set signal handlers
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, terminate)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as error:
        print(f"hotrow: {str(error) or 'aborted'}", file=sys.stderr)
        raise typer.Exit(128 + got) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _version(value: bool) -> None:
    if value:
        print(f"hotrow {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Raw click logs in, a trained DLRM out. Start with `hotrow fit FILE`; every verb has --help with an example."""


@verb("fit", home="hotrow.cli.tools", example="hotrow fit clicks.csv --label click --time ts")
def fit(
    paths: Paths,
    *,
    read: ReadOptions,
    schema: SchemaFile = None,
    split: Split = None,
    fractions: Fractions = None,
    no_refit: Annotated[
        bool,
        typer.Option("--no-refit", help="Train once; else a second run trains on the validation rows too."),
    ] = False,
    no_choice: Annotated[
        bool,
        typer.Option("--no-choice", help="Take all guessed statistics; else short runs choose on validation rows."),
    ] = False,
    rivals: Annotated[
        bool,
        typer.Option("--rivals", help="Train a logistic regression and LightGBM on the same rows, to compare."),
    ] = False,
    set_: Set = None,
) -> Answer:
    """Guess what the columns of raw logs are, prepare them, train a model and score it on rows it has not seen."""
    from hotrow.api import fit
    from hotrow.cli.tools import result_of
    from hotrow.config.load import overrides_of

    began_s, rows = monotonic(), paths[0] if len(paths) == 1 else f"{len(paths)} files"
    shares = {} if fractions is None else {"fractions": _fractions(fractions)}
    overrides = overrides_of(set_ or ())
    if own := [name for name in overrides if name in NOT_OF_A_CONFIG]:
        raise ValueError(f"--set {own[0]}: not an option of a config; docs/config.md lists them")
    how = {"schema": schema, "split": {"kind": split, **shares} if split or shares else None}
    data = paths if len(paths) > 1 else paths[0]
    chosen: dict[str, Any] = {"refit": not no_refit, "choice": not no_choice, "rivals": rivals}
    run = unwrap(fit)(data, read=read, **how, **chosen, **overrides)
    commands = run.next_commands(*([] if len(paths) > 1 else [shlex.quote(rows)]))
    result = result_of(run, rows, monotonic() - began_s, commands)
    return result, lambda: print(result["text"])


@verb("demo", home="hotrow.cli.tools", example="hotrow demo   (your own logs: hotrow fit clicks.csv --label click)")
def demo(
    *,
    folder: Annotated[Path, typer.Option(help="Folder for the synthetic logs and their packed form.")] = Path(
        "demo-data"
    ),
) -> Answer:
    """Make synthetic Criteo-shaped clicks, prepare them, train a DLRM, evaluate it."""
    from hotrow.cli.tools import demo_on_synthetic

    result = demo_on_synthetic(folder)
    return result, lambda: print(result["text"])


@verb("init", home="hotrow.data.prepare.init", example="hotrow init clicks/*.parquet --label click --out clicks")
def init(
    paths: Paths,
    *,
    read: ReadOptions,
    model: Annotated[str | None, typer.Option(help="The recipe's model by its name, such as dcn or din.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to write schema.yaml and recipe.yaml into.")] = Path(),
) -> Answer:
    """Look at logs, or a packed dataset, and write a commented schema and recipe for it."""
    from hotrow.data.prepare.init import run_init

    found = run_init(paths[0] if len(paths) == 1 else paths, model=model, out=out, **vars(read))
    result = {"found": found.found, "files": [str(file) for file in found.files], "next": list(found.commands)}
    return {**result, "columns": [asdict(guess) for guess in found.columns]}, lambda: _print_init(result)


@verb("prepare", home="hotrow.data.prepare.prepare", example="hotrow prepare criteo train.txt --out data/criteo")
def prepare(
    source: Annotated[
        str, typer.Argument(help="criteo, avazu, taobao, csv, parquet, feather, orc, jsonl, or auto to tell.")
    ],
    paths: Paths,
    *,
    out: Annotated[Path, typer.Option(help="Folder for the packed dataset; interrupted work there is continued.")],
    schema: SchemaFile = None,
    read: ReadOptions,
    split: Split = None,
    fractions: Fractions = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random split and of --sample.")] = None,
    min_count: Annotated[
        int | None, typer.Option(help="Ids seen fewer times than this in training share row 0.")
    ] = None,
    hash_cap: Annotated[int | None, typer.Option(help="Replace ids by ids modulo this, before counting.")] = None,
    sample: Annotated[float, typer.Option(help="Share of the rows to keep, for a first look.")] = 1.0,
    rows: Annotated[int | None, typer.Option(help="Only the first so many rows.")] = None,
    memory: Annotated[str | None, typer.Option(help="Limit for counters and vocabularies, e.g. 4GiB.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads for encoding; default: the cores this process may use.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is at --out.")] = False,
    base: Annotated[
        str | None,
        typer.Option(
            help="The day before, a dataset or a run: its schema and the rows of its ids are kept, new ids get new "
            "rows. none: this is the first day."
        ),
    ] = None,
) -> Answer:
    """Pack raw logs: count the training rows, number ids by popularity, encode. Resumable."""
    from hotrow.base.progress import progress_bar
    from hotrow.data.prepare.prepare import run_prepare
    from hotrow.run.folder import dataset_of

    with progress_bar() as progress:
        dataset = run_prepare(
            source,
            paths[0] if len(paths) == 1 else paths,
            out,
            schema=schema,
            **vars(read),
            split=split,
            fractions=_fractions(fractions),
            seed=seed,
            min_count=min_count,
            hash_cap=hash_cap,
            rows=rows,
            sample=sample,
            memory=memory,
            threads=threads,
            overwrite=overwrite,
            progress=progress,
            announce=_say,
            base=None if base is None else dataset_of(base),
        )
    result = {
        "out": str(out),
        "name": dataset.info.name,
        "rows": {name: split.num_rows for name, split in dataset.splits.items()},
        "num_embeddings": {table.name: table.num_embeddings for table in dataset.info.tables},
        "summary": dict(dataset.info.summary),
        "checksum": dataset.checksum,
    }
    said = ("notes", "left_out", "ids", "hours")
    summary = {name: value for name, value in dataset.info.summary.items() if name not in said}
    return result, lambda: _print_fields({"out": result["out"], "rows": result["rows"], "summary": summary})


@verb(
    "train",
    home="hotrow.api",
    example="hotrow train recipes/criteo-small.yaml --set train.seed=2   (go on: hotrow train --resume RUN; a new run "
    "from its weights: hotrow train --from RUN --set data=data/day_2)",
)
def train(
    config: Annotated[Path | None, typer.Argument(help="A YAML config, e.g. recipes/criteo-small.yaml.")] = None,
    *,
    resume: Annotated[Path | None, typer.Option(help="Continue the run in this folder to the same bits.")] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="Start from the weights of this finished run; without a CONFIG, with its options."),
    ] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(help="When so many minutes are over, save a checkpoint and end with exit code 138 (SIGUSR1)."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Train so many runs, with seeds from train.seed on, and show the mean and its error."),
    ] = None,
    set_: Set = None,
) -> Answer:
    """Train as a config says, continue an interrupted run, or start from a finished one; also on several ranks."""
    from hotrow.api import Run
    from hotrow.base.progress import num_of
    from hotrow.config.load import load_config
    from hotrow.parallel.agreement import on_every_rank
    from hotrow.parallel.launch import joined
    from hotrow.run import runs

    began_s = monotonic()
    if (resume is None) == (config is None and from_ is None):
        raise ValueError(
            "pass a config to start a run, --from RUN to start from its weights, or --resume RUN to continue it"
        )
    if max_minutes is not None and not max_minutes > 0:
        raise ValueError(f"--max-minutes is {max_minutes:g}; give a number above 0, or leave it out")
    until_s = math.inf if max_minutes is None else began_s + 60 * max_minutes
    overrides = [*(set_ or ())]
    if seeds is not None and (resume is not None or size_variable(os.environ) is not None):
        raise ValueError(
            "--seeds begins runs in one process: leave out --resume, and start it without torchrun or mpiexec"
        )
    with joined() as comm:
        if from_ is not None:
            overrides.append(f"from_run={json.dumps(str(from_))}")
            if config is None:
                config, overrides = runs.config_of(from_), ["run=null", *overrides]
        if seeds is not None:
            assert config is not None
            return _train_seeds(load_config(config, overrides), seeds, until_s)
        if resume is not None:
            folder = runs.resume(resume, overrides, comm=comm, until_s=until_s)
        else:
            assert config is not None
            with warnings.catch_warnings():
                if comm.rank:  # the first rank tells
                    warnings.simplefilter("ignore")
                given = on_every_rank(comm, functools.partial(load_config, config, overrides))
            folder = runs.train(given, comm=comm, until_s=until_s)
    if comm.rank:  # the first rank tells the result
        raise typer.Exit(128 + (folder.record.signal or 0) if folder.record.status == "interrupted" else 0)
    run = Run(folder.path)
    result = run.summary()
    assert run.record.dataset is not None, "training has begun"
    title = f"{run.record.dataset['name']}, {num_of(result['epochs'], 'epoch')}"
    return result, lambda: print(run.closing_lines(title, run.next_commands()))


def _train_seeds(config: Any, num_seeds: int, until_s: float) -> Answer:
    """Trains a config with several seeds, one after another; a signal ends the series."""
    from hotrow.run import runs
    from hotrow.tune.compare import of_seeds, over_seeds, with_error

    records, paths = [], []
    for own in of_seeds(config, num_seeds):
        folder = runs.train(own, until_s=until_s)
        records.append(folder.record)
        paths.append(str(folder.path))
        if folder.record.status == "interrupted":
            return {"status": "interrupted", "signal": folder.record.signal, "runs": paths}
    metrics = over_seeds(records)
    result = {"status": "finished", "runs": paths, "split": records[0].final_metrics.get("split"), "metrics": metrics}
    shown = {name: with_error(own) for name, own in metrics.items()}
    return result, lambda: _print_fields({"runs": paths, "split": result["split"], "mean and its error": shown})


@verb("days", home="hotrow.days.walk", example="hotrow days logs/ --label click --time ts --out chain")
def days(
    logs: Annotated[Path, typer.Argument(help="A folder with a file or a folder of logs for each day, in name order.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the chain: datasets, runs, deltas, model and report.")],
    recipe: Annotated[
        Path | None, typer.Option(help="A YAML config for the first day; chosen by its number of rows if not given.")
    ] = None,
    schema: SchemaFile = None,
    read: ReadOptions,
    keep: Annotated[int, typer.Option(help="Keep datasets and runs of so many days; deltas stay.")] = 2,
    accept: Annotated[list[str] | None, typer.Option(help="A day to train on although its labels are odd.")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Say more than a line a day.")] = False,
    set_: Set = None,
) -> Answer:
    """Do each day of a folder that is not done: prepare, score, train, export, apply. Kill it: it goes on."""
    from hotrow.days.walk import walk_days

    options = {"recipe": recipe, "schema": schema, "keep": keep, "overrides": set_ or (), "accept": accept or ()}
    result = walk_days(logs, out, **vars(read), **options, verbose=verbose)
    shown = {name: value for name, value in result.items() if name not in ("status", "newest")}
    return result, lambda: _print_fields(shown)


@verb(
    "tune",
    home="hotrow.tune.tune",
    example="hotrow tune recipe.yaml --trials 40   (whose section `tune` says what to search: docs/tune.md)",
)
def tune(
    config: Annotated[Path, typer.Argument(help="A YAML config with a section `tune`: fields, and their values.")],
    *,
    trials: Annotated[int, typer.Option(help="Recipes to try, those of an earlier call included.")] = 20,
    seeds: Annotated[
        int, typer.Option(help="Seeds with which the best recipe and the given one are trained and compared.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder of trials, where a search goes on; default: tuned/NAME.")
    ] = None,
    set_: Set = None,
) -> Answer:
    """Search fields of a config for the best validation score; poor trials are stopped early. Kill it: it goes on."""
    from hotrow.tune.tune import lines_of, tune

    result = tune(config, trials=trials, seeds=seeds, out=out, overrides=set_ or (), say=_say)
    return result, lambda: print(*lines_of(result), sep="\n")


@verb("runs", home="hotrow.cli.tools", example="hotrow runs   (two of them: hotrow runs runs/a runs/b)")
def runs(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="A folder, whose runs are listed (default: runs), or two runs.")
    ] = None,
    *,
    remove: Annotated[list[Path] | None, typer.Option(help="Remove this run; may be repeated.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    clean: Annotated[
        Path | None, typer.Option(help="Keep this run, without its checkpoints but the newest and the chosen one.")
    ] = None,
    data: Annotated[
        bool, typer.Option("--data", help="With --clean: without data that was packed into its folder, too.")
    ] = False,
) -> Answer:
    """List runs, compare two of them on their test rows, or remove some, or what they no longer need."""
    from hotrow.base.files import folder_bytes, size
    from hotrow.cli import tools
    from hotrow.run.folder import RunFolder
    from hotrow.tune import compare, listing

    if clean is not None:
        if paths or remove:
            raise ValueError(f"--clean names the run to clean, so leave out {(*(paths or ()), *(remove or ()))[0]}")
        return tools.clean(clean, data=data)
    if data:
        raise ValueError("--data says what --clean removes too: name the run with --clean")
    if remove:
        if paths:
            raise ValueError(f"--remove names the runs to remove, so leave out {paths[0]}")
        remove = [*{path.resolve(): path for path in remove}.values()]
        found = [RunFolder.open(path) for path in remove]  # all of them, before one goes
        for run in found:
            if not yes:
                about = f"{run.record.status}, {size(folder_bytes(run.path))}"
                typer.confirm(f"remove {run.path} ({about})?", abort=True, err=True)
        return {"removed": [str(path) for path in remove], "bytes_freed": sum(map(listing.remove_run, remove))}
    if paths is not None and len(paths) > 2:
        raise ValueError("two runs are compared, one folder is listed; name one or two")
    if paths is not None and len(paths) == 2:
        pair = compare.compare(*paths)
        return pair, lambda: print(*compare.lines_of(pair), sep="\n")
    rows = listing.list_runs(paths[0] if paths else Path("runs"))
    return {"runs": rows}, lambda: print(*listing.lines_of(rows), sep="\n")


@verb(
    "eval",
    home="hotrow.api",
    example="hotrow eval runs/clicks-dlrm-001 new/*.parquet   (the run's own test rows: hotrow eval RUN)",
)
def eval_(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    paths: Annotated[list[str] | None, typer.Argument(help="Raw rows with labels; default: a packed dataset.")] = None,
    *,
    data: Annotated[Path | None, typer.Option(help="A packed dataset; default: the run's own.")] = None,
    split: Annotated[str | None, typer.Option(help="Which split of it; default: test.")] = None,
    strict: Strict = False,
) -> Answer:
    """Show AUC, LogLoss, normalised entropy and calibration of a run, on a split or on new raw rows."""
    from hotrow.api import load

    if paths and (data or split):
        raise ValueError(
            f"{paths[0]} names raw rows, but --data and --split are for a packed dataset; give one or the other"
        )
    with closing(load(run)) as loaded:
        if paths:
            result = {"run_dir": str(run), "rows": paths, **loaded.evaluate_rows(_files(paths), strict=strict)}
        else:
            result = {"run_dir": str(run), "split": split or "test", **loaded.evaluate(split or "test", data=data)}
        told = loaded.told()
    shown = {name: "undefined" if value is None else value for name, value in result.items()}
    if result["undefined"] is None:
        del shown["undefined"]
    return {**result, **told}, lambda: _print_fields(shown)


@verb("predict", home="hotrow.api", example="hotrow predict runs/clicks-dlrm-001 new/*.parquet --out scores.parquet")
def predict(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    paths: Paths,
    *,
    out: Annotated[
        Path, typer.Option(help="File of scores, .parquet or .csv, which must not exist yet; - is standard output.")
    ],
    keep: Annotated[
        list[str] | None, typer.Option(help="Column to write beside the score, unchanged; may be repeated.")
    ] = None,
    explain: Annotated[
        int, typer.Option(min=0, help="How many columns to name in a column `explanation`: those that matter most.")
    ] = 0,
    strict: Strict = False,
) -> Answer:
    """Score raw rows (- is standard input): one probability per row, in the rows' order, in column `score`."""
    from hotrow.api import load

    is_stdout = str(out) == "-"
    with closing(load(run)) as loaded:
        to = sys.stdout.buffer if is_stdout else out
        result = {
            "run_dir": str(run),
            "out": str(out),
            "rows": loaded.write_scores(_files(paths), to, keep=keep or (), explain=explain, strict=strict),
        }
        told = loaded.told()
    # Whoever reads scores from standard output wants nothing else there, unless it is asked for (--json).
    return {**result, **told}, lambda: None if is_stdout else _print_fields(result)


@verb("export", home="hotrow.api", example="hotrow export runs/clicks-dlrm-001 --out clicks-export")
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder to make; must not exist yet.")],
    since: Annotated[
        Path | None, typer.Option(help="An earlier export: write a delta, which holds only what changed since.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint to export; default: the one that `predict` uses.")
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(help="How tables store their rows: float32 (default), bf16 or int8. Prints what it costs in AUC."),
    ] = None,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write the network as dense.onnx too, from looked-up rows to scores.")
    ] = False,
) -> Answer:
    """Write weights (safetensors), vocabularies (Parquet) and rules, to score raw rows in plain PyTorch."""
    from hotrow.api import load
    from hotrow.base.progress import progress_bar

    form: Any = rows
    with closing(load(run)) as loaded, progress_bar() as progress:
        made = loaded.export(out, since=since, step=step, rows=form, onnx=onnx, progress=progress)
    result: dict[str, Any] = {"run_dir": str(run), "out": str(out)}
    if since is not None:
        result |= {"since": str(since), **_summary_of(made)}
    else:
        num_bytes = sum(file["num_bytes"] for file in made["files"].values())
        tables, files = len(made["tables"]), len(made["files"]) + 1
        result |= {"step": made["step"], "tables": tables, "files": files, "bytes": num_bytes}
    if (cost := made["row_cost"]) is None:
        return result
    shown = {
        name: f"{own['export']:.6f} with these rows, {own['run']:.6f} with the run's"
        for name, own in cost["metrics"].items()
    }
    told = {f"{cost['num_rows']:,} rows of the {cost['split']} split": shown}
    return {**result, "row_cost": cost}, lambda: _print_fields(result | told)


def _summary_of(delta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what people want to know of a delta."""
    return {
        "number": delta["number"],
        **{what: sum(table[what] for table in delta["tables"].values()) for what in ("rows", "ids")},
        "bytes": sum(file["num_bytes"] for file in delta["files"].values()),
    }


@verb("apply", home="hotrow.export.delta", example="hotrow apply clicks-1 clicks-delta-2 --out clicks-2")
def apply(
    export: Annotated[Path, typer.Argument(help="The export to bring forward; it stays as it is.")],
    delta: Annotated[Path, typer.Argument(help="The next delta, which `hotrow export --since` wrote.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder to make of both, which must not exist yet.")],
) -> Answer:
    """Bring an export forward: make the next one of it and of the rows, ids and weights of a delta."""
    from hotrow.export.delta import apply_delta

    return {"export": str(out), **_summary_of(apply_delta(export, delta, out))}


@verb("serve", home="hotrow.serve.scorer", example="hotrow serve clicks-export --memory 1GiB")
def serve(
    export: Annotated[Path, typer.Argument(help="An export's folder, which is never written to, or a link to it.")],
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8080,
    memory: Annotated[
        str | None,
        typer.Option(help="How much of the tables may be in memory, e.g. 1GiB; default: the system decides."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Take each version that EXPORT comes to lead to: CHAIN/model of `days`.")
    ] = False,
) -> Answer:
    """Score raw rows over HTTP: POST /score, GET /health, GET /metrics."""
    from hotrow.serve.scorer import Scorer

    try:
        from hotrow.serve.server import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"hotrow serve needs {error.name}: pip install 'hotrow[serve]'") from None
    scorer = Scorer(export, memory=memory)
    serve(scorer, host=host, port=port, follow=follow)
    return {"export": str(scorer.path), "version": scorer.version}


@verb(
    "plan",
    home="hotrow.cli.plan",
    example="hotrow plan recipes/criteo-small.yaml   (beside it: --set train.threads=2 --set 'memory.dram=64MiB "
    "train.batch_size=4096')",
)
def plan(
    config: Annotated[Path, typer.Argument(help="A YAML config, e.g. recipes/criteo-small.yaml.")],
    *,
    no_trial: Annotated[bool, typer.Option("--no-trial", help="Only say what was decided; take no steps.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="An alternative to try beside the config, e.g. train.threads=2; a blank parts two overrides."
        ),
    ] = None,
) -> Answer:
    """Say before training where tables will lie and why, and try some real steps; also on several ranks."""
    from hotrow.cli.plan import lines_of, plan
    from hotrow.parallel.launch import joined

    with joined() as comm:
        found = plan(config, set_ or (), tries=not no_trial, comm=comm)
        rank = comm.rank
    if rank:  # the first rank tells
        raise typer.Exit
    return found.to_json(), lambda: print(*lines_of(found), sep="\n")


@verb("inspect", home="hotrow.cli.tools", example="hotrow inspect data/criteo --batch-size 4096 --dim 64 --out hotness")
def inspect(
    path: Annotated[Path, typer.Argument(help="A packed dataset.")],
    *,
    split: Annotated[str, typer.Option(help="The split to read.")] = "train",
    batch_size: Annotated[int, typer.Option(help="Samples per step.")] = 2048,
    dim: Annotated[int, typer.Option(help="Embedding dim of every table (float32), to count bytes.")] = 16,
    batches: Annotated[int | None, typer.Option(help="Read only the first so many: a quick look at much data.")] = None,
    seed: Annotated[int, typer.Option(help="Seed for choosing samples for --hot.")] = 0,
    hot: Annotated[
        str | None,
        typer.Option(help="Bytes of a fast device, e.g. 256MiB: compares three ways to choose rows for it."),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="The optimizer whose state is kept beside hot rows.")] = "sgd",
    out: Annotated[Path | None, typer.Option(help="Folder for the report: JSON and one HTML page.")] = None,
) -> Answer:
    """Report hotness: bytes that a step demands of each table, and how few rows take most accesses."""
    from hotrow.base.progress import progress_bar
    from hotrow.cli import tools
    from hotrow.inspect.report import print_inspection

    with progress_bar() as progress:
        result = tools.inspect(
            path,
            split=split,
            batch_size=batch_size,
            embedding_dim=dim,
            batches=batches,
            seed=seed,
            hot=hot,
            optimizer=optimizer,  # type: ignore[arg-type]
            out=out,
            progress=progress,
        )
    return result, lambda: print_inspection(result)


@verb("report", home="hotrow.cli.tools", example="hotrow report runs/clicks-dlrm-001")
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder: finished, interrupted, failed or killed.")],
    *,
    out: Annotated[Path | None, typer.Option(help="File to write; default: report.html in the run's folder.")] = None,
) -> Answer:
    """Write one HTML page that says how a run went."""
    from hotrow.cli import tools

    result = tools.report(run, out=out)
    return result, lambda: print(result["run"], *result["sentences"], f"wrote {result['out']}", sep="\n  ")


@verb("check", home="hotrow.cli.tools", example="hotrow check data/criteo")
def check(
    path: Annotated[Path, typer.Argument(help="A packed dataset, a checkpoint, a run, an export or a delta.")],
) -> Answer:
    """Verify every byte of a packed dataset, a checkpoint, a run, an export or a delta against its checksums."""
    from hotrow.cli import tools

    return tools.check(path)


@verb("doctor", home="hotrow.cli.tools", example="hotrow doctor   (measures memory and a disk: hotrow doctor /nvme)")
def doctor(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders whose disks to measure; each takes a file of 256 MiB for some seconds."),
    ] = None,
) -> Answer:
    """Show what decides whether and how fast hotrow runs here; paste it into bug reports."""
    from hotrow.cli import tools

    return tools.doctor(folders or ())


def _files(paths: Sequence[str]) -> list[str]:
    return ["/dev/stdin" if path == "-" else path for path in paths]


def _fractions(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--fractions {text!r} is not a list of numbers; write it as 0.8,0.1,0.1") from None


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _print_init(result: Mapping[str, Any]) -> None:
    print(f"found {result['found']}")
    for file in result["files"]:
        print(f"wrote {file}")
    print("next:", *result["next"], sep="\n  ")


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


def main() -> None:
    """The `hotrow` command."""
    warnings.showwarning = _one_line_warning
    try:
        from hotrow.base.files import check_text

        for argument in sys.argv[1:]:  # records of runs and of datasets could not hold bytes that are not UTF-8
            check_text(argument, what="an argument")
        app()
    except Exception as error:
        if os.environ.get("HOTROW_DEBUG") == "1":
            traceback.print_exc()
        if isinstance(error, ValueError | OSError | MemoryError):
            _say(f"hotrow: {str(error) or type(error).__name__}")
            sys.exit(2)
        told = " ".join(f"{type(error).__name__}: {error}".split())
        _say(
            f"hotrow: this should not happen; it is a bug in hotrow ({told}); HOTROW_DEBUG=1 shows where. "
            "Please report it with what `hotrow doctor` prints"
        )
        sys.exit(1)


def _one_line_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _say(f"hotrow: warning: {message}")
