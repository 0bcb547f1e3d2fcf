"""Trackers of experiments that take a run's numbers beside metrics.jsonl and TensorBoard: `train.sinks` names them.

Both follow a run over its sessions by a key of it. Neither package is a dependency: who names one installs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple


class Sink(NamedTuple):
    """What takes the numbers of one session."""

    add_scalar: Callable[[str, float, int], Any]
    """Takes a number by its name, and its step."""
    close: Callable[[], Any]


def _wandb(wandb: Any, name: str, key: str, options: Mapping[str, str]) -> Sink:
    run = wandb.init(id=key, name=name, config=dict(options), resume="allow")
    run.define_metric("*", step_metric="step")  # W&B's own steps never fall, those of a resumed run may
    return Sink(lambda tag, value, step: run.log({tag: value, "step": step}), run.finish)


def _mlflow(mlflow: Any, name: str, key: str, options: Mapping[str, str]) -> Sink:
    if found := mlflow.search_runs(filter_string=f"tags.hotrow = '{key}'", output_format="list"):
        mlflow.start_run(run_id=found[0].info.run_id)
    else:
        mlflow.start_run(run_name=name, tags={"hotrow": key})
        mlflow.log_params(dict(options))
    return Sink(lambda tag, value, step: mlflow.log_metric(tag, value, step=step), mlflow.end_run)


_OPEN = {"wandb": _wandb, "mlflow": _mlflow}


def check_sinks(names: Sequence[str]) -> None:
    """Raises ValueError, with the line that installs it, if the package of a sink is absent."""
    for name in names:
        try:
            import_module(name)
        except ImportError as error:
            text = f"train.sinks names {name}, which cannot be imported ({error}): pip install {name}"
            raise ValueError(text) from None


def open_sink(kind: str, *, name: str, key: str, options: Mapping[str, str]) -> Sink:
    """Returns the sink `kind`. name, key: of the run, for people and for its later sessions. options: its config."""
    return _OPEN[kind](import_module(kind), name, key, options)
