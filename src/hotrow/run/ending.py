"""What comes after the last step of a run: weights are chosen, calibrated, scored, and looked at for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hotrow.objectives.calibration import Calibration, fitted
from hotrow.objectives.objective import Metrics
from hotrow.run.checkpoint import load_checkpoint
from hotrow.run.folder import RunFolder
from hotrow.run.scores import gains, inputs_of, scores_of
from hotrow.run.trainer import Training
from hotrow.run.usual import usual_of
from hotrow.setup.setup import is_selection


def finish(training: Training) -> None:
    """Chooses the weights (the best with early stopping, else the last), scores them and writes run.json."""
    state = training.state
    chosen, val = state.step, state.val
    if training.config.train.early_stopping is not None:
        chosen, val = state.best_step, state.best
        best = training.folder.checkpoints / f"step-{chosen}"
        with training.aside():
            load_checkpoint(best, {"embedding": training.parts.embedding, "model": training.parts.model})
    judged = {split: training.parts.objective.metrics() for split in ("val", "test") if training.has(split)}
    metrics = {"val": val} if val else {}
    if "val" in judged and not val:
        metrics["val"] = training.score("val", step=chosen, metrics=judged["val"])
    calibration = _calibrate(training, judged.get("val"), chosen)
    if "test" in judged:
        metrics["test"] = training.score("test", step=chosen, metrics=judged["test"])
    doubts = training.parts.objective.doubts
    _warn_of(training, [doubts(metrics[split], f"the {split} split") for split in ("val", "test") if split in metrics])
    if training.writes_files:
        _count_columns(training)
    is_final = not is_selection(training.folder.path) or "test" not in judged  # else the next run is looked at
    if training.parts.items is None and is_final:
        _look_at_scores(training, judged, chosen)
    training.folder.update(
        status="finished",
        ended=state.ended,
        chosen_step=chosen,
        metrics=metrics,
        calibration=calibration,
        **training.figures(),
    )


def _calibrate(training: Training, judged: Metrics | None, step: int) -> Calibration | None:
    """The map of `calibration.method` for the weights of `step`, which from here on follows the model.

    It is fitted to the validation rows, which are judged without it: `judged` holds their outputs, or will. Without
    such rows it is the map of the selection, if there was one, whose weights had not seen them. Collective.
    """
    if (method := training.config.calibration.method) is None:
        return None
    if judged is not None:
        if not judged.num_rows:  # it was scored when these weights were the newest
            training.evaluated("val", metrics=judged)
        found = fitted(method, *judged.rows(), step=step)
    else:
        path = training.folder.selection
        selected = RunFolder.open(path).record.calibration if path.is_dir() else None
        if selected is None or selected.method != method:
            text = f"{path} has no calibration by {method}, and this run no rows to fit it to"
            training.warn("not_calibrated", text, count=1)
            return None
        found = replace(selected, step=step, from_selection=True)
    training.say(f"calibration: {found.line()}")
    if training.has("test"):
        found.follow(training.parts.model)
    return found


def _count_columns(training: Training) -> None:
    """Keeps what the splits hold by column. A run is not lost if a block that it did not train on is damaged."""
    try:
        ranges, columns, told = usual_of(training.dataset)
    except (OSError, ValueError) as error:
        training.warn("columns_not_counted", f"later scores will have nothing to be compared with: {error}", count=1)
        return
    _warn_of(training, [told])
    if not columns and (path := training.folder.selection).is_dir():  # all rows train, and it had left some out
        columns = RunFolder.open(path).record.columns or {}
    training.folder.update(ranges=ranges, columns=columns)


def _look_at_scores(training: Training, metrics: Mapping[str, Metrics], step: int) -> None:
    """Keeps what the scores of the last of the judged splits show, and its mean inputs; without one, those of training.
    A run is not lost if that cannot be told. Collective."""
    split, judged = list({"train": None, **metrics}.items())[-1]
    if judged is not None and not judged.num_rows:  # it was scored when these weights were the newest
        training.evaluated(split, metrics=judged)
    own, first, found = training.dataset.split(split), training.writes_files, None
    try:
        with training.aside():
            inputs = inputs_of(training.parts, own, is_first=first)
            if first and judged is not None:
                gained = gains(inputs, own.info, train_s=training.state.train_s)
                found = scores_of(split, training.parts.objective, judged.rows(), gained)
        if first:
            training.folder.update(scores=found, means=inputs.means(own.info, step))
    except (OSError, ValueError) as error:
        training.warn("scores_not_looked_at", f"the report will not say what columns give: {error}", count=1)


def _warn_of(training: Training, found: Sequence[Mapping[str, str]]) -> None:
    """Shows and counts warnings about the end of the run, by code; a resumed run comes to it again."""
    for code in dict.fromkeys(code for told in found for code in told):
        texts = [told[code] for told in found if code in told]
        training.warn(code, "; ".join(texts), count=len(texts))
