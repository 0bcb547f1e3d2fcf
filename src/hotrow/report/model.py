"""What a modeller asks of a run: which columns it used, what each gives, how good its scores are, what it kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotrow.base.progress import num_of
from hotrow.data.packed.format import DatasetInfo
from hotrow.draw import line_chart
from hotrow.objectives.objective import Measure
from hotrow.report.columns import Column, columns_of, schema_of
from hotrow.report.facts import RunFacts, mapping_in, number_in, points
from hotrow.report.shapes import HEIGHT, WIDTH, Cell, Chart, Figure, Grid, curves_chart, percent, shown

SPLITS = {"val": "validation"}
"""Names of splits for people, if they differ."""
KEPT = "kept weights"


def steps_of(run: RunFacts) -> int:
    """Returns how many steps are known to have been trained: by run.json, or by the last line of a killed run."""
    steps = [int(line["step"]) for line in run.lines if line["kind"] == "train"]
    return max(int(run.record.get("steps") or 0), *steps, 0)


def metrics_of(run: RunFacts) -> dict[str, Any]:
    """Returns the final metrics, or else the last evaluation's, with `split`; {} if nothing was scored. Training rows
    are scored before the first step alone, by another run's weights, which says nothing of this run."""
    for split in ("test", "val"):
        if found := mapping_in(run.record, "metrics", split):
            return {"split": split, **found}
    evaluations = [line for line in run.lines if line["kind"] == "eval" and line.get("split") != "train"]
    return {"split": "", **max(evaluations, key=lambda line: int(line["step"]))} if evaluations else {}


def loss_chart(run: RunFacts) -> Chart:
    """The training loss and that of the evaluations over steps, with the weights that were kept."""
    loss, splits = run.objective.loss_figure, {"val": "validation", "test": "test"}
    curves = {", ".join(["training", *_options_of_loss(run)]): points(run.lines, "train", "loss")}
    curves |= {name: points(run.lines, "eval", loss, split=split) for split, name in splits.items()}
    curves[KEPT] = [point for point in curves["validation"] if point[0] == run.record.get("chosen_step")]
    return curves_chart(curves, y_label=run.objective.loss_title, label="Loss over steps", dashed=[KEPT])


def _options_of_loss(run: RunFacts) -> list[str]:
    """Returns the options of `train` that make the training loss another one than the evaluations'."""
    defaults = {name: str(getattr(run.objective, name)) for name in run.objective.loss_options}
    given = {name: run.options.get(f"train.{name}", default) for name, default in defaults.items()}
    return [f"{name} {value}" for name, value in given.items() if value != defaults[name]]


# ---- columns


def column_text(run: RunFacts) -> str:
    """Returns what labels, weight and time are, and how many columns are inputs."""
    if run.info is None:
        return ""
    schema, names = schema_of(run.info), ", ".join(label.name for label in run.info.labels)
    time = "" if schema is None or schema.time is None else f" The time of a row is {schema.time.column}."
    inputs = f"{num_of(len(columns_of(run.info)), 'column')} of the data"
    label = f"The label{'s are' if len(run.info.labels) > 1 else ' is'} {names}."
    weight = "" if run.info.weight is None else f" Rows count by their {run.info.weight}."
    return f"{label}{weight}{time} The model's inputs are made of {inputs}."


def scores_of(run: RunFacts) -> Mapping[str, Any]:
    """Returns what the scores of a run show; if all its rows trained, those of the run that found its steps."""
    return mapping_in(run.record, "scores") or mapping_in(run.selection or {}, "scores")


def column_grid(run: RunFacts) -> Grid | None:
    """Returns the columns that the model uses: what they give, what is made of them, and what of them is missing."""
    if run.info is None:
        return None
    split = str(metrics_of(run).get("split", ""))
    counts, gains = mapping_in(run.record, "columns", split), mapping_in(scores_of(run), "gains")
    rows: list[list[Cell | str]] = []
    for name, column in columns_of(run.info).items():
        ids = [mapping_in(counts, f"{each} (ids)") or mapping_in(counts, each) for each in column.features]
        cells: list[Cell | str] = [
            _gain(gains.get(name)),
            _use(run.info, name, column),
            percent(_share(ids, "unknown")),
        ]
        rows.append([name, *cells, percent(_missing(run.info.summary, [name, *column.features]))])
    rows.sort(key=lambda row: -(row[1].sort or 0.0) if isinstance(row[1], Cell) else 0.0)
    heads = ["used as", f"ids of {SPLITS.get(split, split)} rows unknown or rare", "missing in all rows"]
    return ["column", f"{run.objective.loss_title} rises by", *heads], rows


def _missing(summary: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """Returns the share of rows read whose cell is missing, by the first of the names that preparation counted."""
    counts, num_rows = mapping_in(summary, "missing"), number_in(summary, "rows_read")
    return next((counts[name] for name in names if name in counts), 0) / num_rows if num_rows else None


def _share(columns: Sequence[Mapping[str, Any]], kind: str) -> float | None:
    """Returns the largest share of a kind of value in columns that count it."""
    found = [(number_in(counts, kind), number_in(counts, "values")) for counts in columns]
    return max((count / values for count, values in found if count is not None and values), default=None)


def _gain(gain: Any) -> Cell:
    increase, error = number_in({"gain": gain}, "gain", "increase"), number_in({"gain": gain}, "gain", "error")
    return Cell("" if increase is None else f"{increase:.4f} \u00b1 {error or 0:.4f}", increase)


def _use(info: DatasetInfo, name: str, column: Column) -> str:
    """Returns what the model's inputs are made of a column, in words."""
    uses, statistics = [], []
    for place in column.dense:
        own = info.dense[place]
        transform = own.transform.partition("(")[0]
        if transform == "target_stat":
            statistics.append(own.name.rpartition(" (prior")[0])
        else:
            uses.append(" ".join(part for part in ("number", own.name if own.name != name else "") if part))
            uses[-1] += "" if transform in ("none", "identity") else f" ({transform})"
    for feature in info.features:
        if feature.name in column.features:
            kind = {"one_hot": "ids", "multi_hot": "sets of ids", "sequence": "lists of ids"}[feature.kind]
            rows = info.table_by_name[feature.table].num_embeddings
            uses.append(f"{kind}{'' if feature.name == name else f' {feature.name}'} in {rows:,} rows")
    uses += [f"statistics of {', '.join(dict.fromkeys(statistics))}"] if statistics else []
    return "; ".join(uses)


def left_out_grid(run: RunFacts) -> Grid | None:
    """Returns the columns of the files that the model does not use, each with the reason."""
    left_out = mapping_in({} if run.info is None else run.info.summary, "left_out")
    return ["column left out", "because"], [[name, str(reason)] for name, reason in left_out.items()]


def gain_text(run: RunFacts) -> str:
    scores = scores_of(run)
    if not mapping_in(scores, "gains"):
        return ""
    split, rows = SPLITS.get(str(scores.get("split")), scores.get("split")), number_in(scores, "gains_rows")
    return (
        f"The values of a column, with all that is made of it, were exchanged among {rows:,.0f} rows of the {split} "
        f"split: without what the column says of its row, the {run.objective.loss_title} rises by so much. Columns "
        "that say the same have small rises, because each stands in for the other. The table of columns has the "
        "rises."
    )


# ---- scores


def calibration_chart(run: RunFacts) -> Chart:
    """The chart of mean scores beside mean labels."""
    scores = mapping_in(run.record, "scores")
    tenths = scores.get("tenths", [])
    curves = {f"mean {what}": [(k, tenth[what]) for k, tenth in enumerate(tenths, 1)] for what in ("label", "score")}
    drawn = line_chart(
        curves, x_label="tenth of the rows, by rising score", y_label="mean", x_scale="linear",
        y_scale="value", ticks={k: str(k) for k in range(1, len(tenths) + 1)}, dashed=("mean score",), width=WIDTH,
        height=HEIGHT, label="Calibration",
    )  # fmt: skip
    known = mapping_in(run.record, "calibration") if scores.get("split") == "test" else {}
    changed = known.get("x") or known.get("slope", 1) != 1
    fitted = f" They were calibrated on validation rows ({known['method']})." if changed else ""
    text = f"Calibration: where the lines part, scores ({run.objective.score}) are too high or too low.{fitted}"
    return Chart(drawn, text)


# ---- what was kept


def kept_text(run: RunFacts) -> str:
    """Returns the step whose weights were kept, and how validation went after it."""
    chosen, steps = run.record.get("chosen_step"), steps_of(run)
    name, measure = _monitored(run)
    curve = points(run.lines, "eval", name, split="val")
    if chosen is None or not curve:
        return ""
    text, at = f"The weights of step {chosen:,} of {steps:,} were kept", dict(curve).get(chosen)
    step, best = max(curve, key=lambda point: measure.sign * point[1])
    last, value = curve[-1]
    if at is None:
        return f"{text}."
    text += f"; the validation {measure.title} was {at:.4f} there"
    if last > chosen:
        verb = "rose" if value > at else "fell" if value < at else "was still"
        return f"{text}. After it, it {verb} {'at' if verb == 'was still' else 'to'} {value:.4f} by step {last:,.0f}."
    if measure.sign * best > measure.sign * at:
        return f"{text}. It had been better, {best:.4f} at step {step:,.0f}: train.early_stopping would keep those."
    return f"{text}, the best of {num_of(len(curve), 'evaluation')}: longer training may help."


def _monitored(run: RunFacts) -> tuple[str, Measure]:
    """Returns the measure that decided which weights were kept."""
    name = str(run.record.get("monitor"))
    name = name if name in run.objective.measures else next(iter(run.objective.measures))
    return name, run.objective.measures[name]


def model_figures(run: RunFacts) -> list[Figure]:
    """Returns the figures of the model: quality, mean score, whose weights were kept, rows."""
    metrics, record = metrics_of(run), run.record
    (best, measure), *others = run.objective.measures.items()
    values = [(other, shown(number_in(metrics, name), ".4f")) for name, other in others]
    quality = ", ".join(f"{other.title} {value}{other.beside}" for other, value in values)
    score, label = (number_in(record, "scores", "rows", what) for what in ("score", "label"))
    rows = mapping_in(record, "rows")
    judged = ", ".join(f"{count:,} {SPLITS.get(name, name)}" for name, count in rows.items() if name != "train")
    return [
        Figure(measure.title, shown(number_in(metrics, best), ".4f"), quality if metrics else "nothing was scored"),
        Figure("Mean score", shown(score, ".4g"), "" if label is None else f"the mean label is {label:.4g}"),
        Figure("Weights of step", shown(record.get("chosen_step"), ",d"), f"of {steps_of(run):,}"),
        Figure("Training rows", shown(number_in(rows, "train"), ",.0f"), judged),
    ]
