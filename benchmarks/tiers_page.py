"""The part of benchmarks.md on tables larger than memory: what benchmarks.tiers measured, in its own tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from benchmarks.markdown import filled, heads, held, span, table
from benchmarks.processors import (
    ByProcessor,
    Found,
    best,
    between,
    by_processors,
    generation,
    measured,
    verdict,
)
from benchmarks.results import Cell
from hotrow.draw import line_chart

OVER_MAPPED, OVER_ROCKSDB = "ours over the whole tables mapped", "ours over RocksDB behind an LRU cache"


def tiers_tables(found: Found) -> list[str]:
    """Training with a part of the tables in DRAM."""
    steps = {name: own for name, own in found.items() if "relative_speed" in best(own)}
    lines: list[str] = []
    for names, group in by_processors(steps).items():
        rows = [tiers_row(*own) for own in group.items()]
        lines += ["", f"On {names}:", "", *filled(heads(COLUMNS, left=(0, 2)), rows)]
    text = (
        "The checkpoint is saved 500 steps after another one and holds the rows that changed; no round contains one. "
        "Below are ratios at 1/32 and Zipf 1.05, and the speed, of that all in DRAM, that each promise takes."
    )
    lines += ["", text, "", *beside_rivals(steps), ""]
    tellers = {"id_to_slot": slot_line, "open_table": open_line, "large": large_line}
    for name, tell in tellers.items():
        lines += [f"- {generation(p)}. {tell(cell)}" for p, cell in found.get(name, {}).items()]
    return lines[1:]


COLUMNS = (
    "cell", "speed, of DRAM's", "promised", "lookups that hit", "waiting", "MB read a step", "MB written", "peak, MB",
    "checkpoint, s", "its MB",
)  # fmt: skip


def beside_rivals(found: Found) -> list[str]:
    """What is promised of ratios, and whether it is held."""
    processors = dict.fromkeys(processor for own in found.values() for processor in own)
    told: Found = {}
    for processor in processors:
        for what, a, b, least in ratios([own[processor] for own in found.values() if processor in own]):
            told.setdefault(what, {})[processor] = {"ratio": a / b, "least": least, "takes": 100 * least * b}

    def promise(cell: Cell) -> str:
        return held(f"{cell['least']:g}x", holds=cell["ratio"] >= cell["least"])

    rows = [
        [
            what,
            between((cell["ratio"] for cell in own.values()), "{:.2f}", "x"),
            verdict(own, promise),
            between((cell["takes"] for cell in own.values()), "{:.0f}", "%"),
        ]
        for what, own in told.items()
    ]
    return table(heads(("ratio of speeds", "ratio", "promised", "the promise takes"), left=(0, 2)), rows)


def ratios(cells: Sequence[Cell]) -> list[tuple[str, float, float, float]]:
    """What is compared at 1/32 and Zipf 1.05, both speeds, each a share of DRAM's in its own run, and the promise.

    cells: of one processor; that share hangs on how a machine's processor and disk stand to each other.
    """

    def speed(side: str, ahead: int | None = None, io: str = "auto") -> float | None:
        wanted = {"dram_parts": 32, "zipf": 1.05, "side": side, "io": io, **({} if ahead is None else {"ahead": ahead})}
        found = [c["relative_speed"] for c in cells if wanted.items() <= c.items()]
        return max(found, default=None)

    ours = speed("tiers", 4)
    found = (
        (OVER_MAPPED, ours, speed("mmap"), 3.0),
        (OVER_ROCKSDB, ours, speed("rocksdb"), 2.5),
        ("ours over ours without look-ahead", ours, speed("tiers", 0), 1.5),
        ("threads over io_uring", speed("tiers", 4, "threads"), ours, 0.8),
    )
    return [(what, a, b, least) for what, a, b, least in found if a and b]


def tiers_sentence(cells: Mapping[str, Mapping[str, Cell]]) -> str | None:
    """The speeds at a tenth and a thirty-second over processors, in a sentence; None where one was not measured.

    cells: name -> processor -> cell.
    """
    tenth, least = tiers_shown(cells)
    by_processor = [[own[p] for own in cells.values() if p in own] for p in least]
    over = [{what: a / b for what, a, b, _ in ratios(own)} for own in by_processor]
    mapped, rocksdb = ([own[what] for own in over if what in own] for what in (OVER_MAPPED, OVER_ROCKSDB))
    if not (tenth and mapped and rocksdb):
        return None
    speeds = [span([cell["relative_speed"] for cell in own.values()], "{:.0%}") for own in (tenth, least)]
    return (
        "a DLRM with Criteo Kaggle's tables (dim 64, Zipf 1.05) trains at "
        f"{speeds[0]} of its speed all in DRAM if DRAM holds a tenth of the tables' bytes and an SSD the rest "
        f"({len(tenth)} processors, each with its own disk), and at {speeds[1]} if DRAM holds a thirty-second "
        f"({len(least)}). At a thirty-second hotrow is {span(mapped, '{:.1f}')} times as fast as mapped files and "
        f"{span(rocksdb, '{:.1f}')} times as fast as RocksDB behind a cache of rows."
    )


def tiers_shown(cells: Mapping[str, Mapping[str, Cell]]) -> list[Mapping[str, Cell]]:
    """Ours, looking ahead, with a tenth and with a thirty-second as DRAM, at Zipf 1.05: by processor."""
    return [cells.get(f"tiers_tiers_dram{parts}_zipf1.05_ahead4", {}) for parts in (10, 32)]


def memory_chart(cells: Mapping[str, Mapping[str, Cell]]) -> str:
    """Returns the README's picture as SVG: speed by the share of the tables that DRAM holds, side and processor.

    cells: name -> processor -> cell. Only Zipf 1.05, with look-ahead if the side has it; all in DRAM is 100 % by
    definition.
    """
    lines: dict[str, list[tuple[float, float]]] = {}
    for side, (name, ahead) in CHART_SIDES.items():
        for own in cells.values():
            for processor, cell in own.items():
                wanted = {"side": side, "ahead": ahead, "zipf": 1.05, "io": "auto"}
                if wanted.items() <= cell.items() and "relative_speed" in cell:
                    line = f"{name}, EPYC {'.'.join(re.findall(r'[0-9]+', processor)[:2])}"  # of family and model
                    lines.setdefault(line, []).append((1 / cell["dram_parts"], cell["relative_speed"]))
    ours = CHART_SIDES["tiers"][0]
    return line_chart(
        {name: sorted([*line, *([(1.0, 1.0)] if name.startswith(ours) else [])]) for name, line in lines.items()},
        x_label="share of the tables' bytes that DRAM holds; the rest is on an SSD",
        y_label="training speed, all in DRAM = 100%",
        ticks={1 / 32: "1/32", 1 / 10: "1/10", 1 / 4: "1/4", 1: "all"},
        label="training speed by the share of the tables in DRAM",
    )


CHART_SIDES = {"tiers": ("hotrow", 4), "mmap": ("mapped files", 1), "rocksdb": ("RocksDB", 0)}
"""Side -> its name in the picture, and how many batches it looks ahead there."""


def tiers_row(name: str, found: ByProcessor) -> list[str]:
    """One side at one part of DRAM."""

    def text(field: str, form: str, scale: float = 1.0, unit: str = "") -> str:
        return between((scale * cell[field] for cell in found.values() if cell.get(field) is not None), form, unit)

    def promise(cell: Cell) -> str:
        target = cell.get("target")
        return "" if target is None else held(f"{target:.0%}", holds=cell["relative_speed"] >= target, of=cell)

    return [
        name,
        measured(found),
        verdict(found, promise),
        text("hit_rate", "{:.1f}", 100, "%"),
        text("stall_share", "{:.1f}", 100, "%"),
        text("bytes_read_per_step", "{:.2f}", 1e-6),
        text("bytes_written_per_step", "{:.2f}", 1e-6),
        text("peak_bytes", "{:,.0f}", 1e-6),
        text("checkpoint_s", "{:.1f}"),
        text("checkpoint_bytes", "{:,.0f}", 1e-6),
    ]


def slot_line(cell: Cell) -> str:
    """What finding the slots of a batch takes, in a sentence."""
    promise = held(f"at most {cell['most']:.0%}", holds=cell["share"] <= cell["most"])
    return f"Ids of a batch to slots: {cell['ms']:.2f} ms, {cell['share']:.1%} of a step ({promise})."


def open_line(cell: Cell) -> str:
    """A table that is made and opened, in a sentence."""
    promise = held(f"less than {cell['most_s']:g} s", holds=cell["worst_s"] < cell["most_s"])
    return (
        f"A table of {cell['table_bytes'] / 1e9:.0f} GB, dim {cell['dim']}, on disk: making its file took "
        f"{cell['make_s']:.3f} s, opening it again {cell['open_s']:.3f} s, and making a collection with it "
        f"{cell['collection_s']:.3f} s, each with {cell['lookups']:,} lookups; the longest {cell['worst_s']:.3f} s "
        f"({promise})."
    )


def large_line(cell: Cell) -> str:
    """The large model in a sentence."""
    losses = f"{cell['losses'][0]:.3f} to {cell['losses'][-1]:.3f}"
    return (
        f"`--large`: tables of {cell['table_bytes'] / 2**30:.0f} GiB, dim {cell['dim']}, Zipf {cell['zipf']} "
        f"({cell['disk_bytes'] / 2**30:.0f} GiB on disk) in a cgroup of {cell['limit_bytes'] / 2**30:.0f} GiB: "
        f"{cell['num_steps']:,} steps, {cell['samples_per_s']:,.0f} samples/s, "
        f"peak {cell['peak_bytes'] / 2**30:.2f} GiB, {cell['hit_rate']:.1%} of lookups hit, "
        f"{cell['evicted_rows'] / 1e6:.1f}M rows evicted and {cell['read_rows'] / 1e6:.1f}M read back, "
        f"{cell['written_bytes'] / 2**30:.1f} GiB written; loss {losses}."
    )
