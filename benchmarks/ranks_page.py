"""The part of benchmarks.md on several processes: what benchmarks.ranks measured, in its own tables."""

from __future__ import annotations

from benchmarks.markdown import filled, heads, held, table
from benchmarks.processors import Found, best, factor, measured, milliseconds, verdict, where
from benchmarks.results import Cell


def ranks_tables(found: Found) -> list[str]:
    """What ranks send, how fast they are beside torchrec's, and what the network takes."""
    lines: list[str] = []
    left = dict(found)
    for key, title, make in (
        ("tried_ms", "Beside torchrec", torchrec_lines),
        ("added_cpu_ms", "Beside one process", process_lines),
        ("over_least", "Bytes of a step", wire_lines),
        ("fewer", "Rows or pooled vectors", pooled_lines),
        ("peer_cpu_ms", "MPI beside gloo", mpi_lines),
        ("not_hidden", "What the network takes", link_lines),
    ):
        if own := {name: by for name, by in left.items() if key in best(by)}:
            left = {name: by for name, by in left.items() if name not in own}
            lines += ["", f"### {title}", "", where(own), "", *make(own)]
    return lines[1:]


def cells_of(found: Found) -> list[Cell]:
    """The cell of each name, of the processor where it is best."""
    return [best(own) for own in found.values()]


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3g}"


def wire_lines(found: Found) -> list[str]:
    """Bytes of a training step."""
    text = (
        "What R ranks together send in a training step, by the kernel's count of their TCP connections. The least: "
        "every distinct row that a rank lacks comes once, one gradient for each goes back, and 2 (R - 1) / R of the "
        "dense gradients. Ids are apart."
    )
    columns = ("cell", "sent without ids, MB", "at least, MB", "sent / least", "promised", "ids, MB")
    rows = [
        [
            cell["name"],
            megabytes(cell["sent_bytes"] - cell["ids_bytes"]),
            megabytes(cell["least_bytes"]),
            f"{cell['over_least']:.3f}x",
            held(f"at most {cell['most']:.2f}x", holds=cell["over_least"] <= cell["most"]),
            megabytes(cell["ids_bytes"]),
        ]
        for cell in cells_of(found)
    ]
    return [text, "", *table(heads(columns, left=(0, 4)), rows)]


def pooled_lines(found: Found) -> list[str]:
    """Bytes of rows beside those of pooled vectors."""
    text = (
        "Bytes of the tables' part of a step, with ids, on 4 ranks that send rows, and on 4 that send pooled vectors "
        "and their gradients, by the same count."
    )
    columns = ("cell", "rows on every rank", "rows, MB", "pooled, MB", "pooled / rows", "promised of the best")
    rows = [
        [
            cell["name"],
            f"{own['prefix']:.0%}",
            megabytes(own["sent_bytes"]),
            megabytes(own["pooled_bytes"]),
            f"{own['fewer']:.2f}x",
            held(f"{cell['least']:.0f}x", holds=own["fewer"] >= cell["least"])
            if own["prefix"] == cell["prefix"]
            else "",
        ]
        for cell in cells_of(found)
        for own in cell["by_prefix"]
    ]
    return [text, "", *table(heads(columns, left=(0, 5)), rows)]


def torchrec_lines(found: Found) -> list[str]:
    """Steps beside torchrec's."""
    text = (
        "Training steps of two processes with one thread each. hotrow sends rows or pooled vectors, whatever its "
        "planner counts to be fewer bytes. torchrec shares its tables row by row or table by table, and exchanges ids "
        "ahead or not; the fastest counts. CPU: what the busiest rank took of its processor in a step."
    )
    columns = ("cell", "peer", "peer / ours", "promised", "ours, ms", "CPU, ms", "peer's CPU, ms", "over MPI, ms")

    def promise(cell: Cell) -> str:
        return held(f"{cell['target']:.2f}x", holds=cell["ratio"] >= cell["target"], of=cell)

    rows = [
        [
            name,
            best(own)["peer"],
            measured(own),
            verdict(own, promise),
            *(milliseconds(own.values(), key) for key in ("ours_ms", "ours_cpu_ms", "peer_cpu_ms", "mpi_ms")),
        ]
        for name, own in found.items()
    ]
    return [text, "", *filled(heads(columns, left=(0, 1, 3)), rows)]


def process_lines(found: Found) -> list[str]:
    """Steps of ranks beside those of one process."""
    text = (
        "Training steps of processes of one thread over MPI, two unless the cell names more, beside those of one "
        "process of two threads (of one thread for batches of 128). CPU: what the busiest rank took of its processor "
        "in a step, and what of that a process of one thread that trains a rank's part of the batch does not take."
    )
    columns = (
        "cell",
        "speed of the ranks",
        "promised",
        "ranks, ms (CPU)",
        "one process, ms",
        "CPU added, ms",
    )
    rows = [
        [
            cell["name"],
            factor(cell),
            held(f"{cell['least']:.2f}x", holds=cell["ratio"] >= cell["least"], of=cell) if cell["least"] else "",
            _ms(cell, "ours"),
            f"{cell['peer_ms']:.1f}",
            f"{cell['added_cpu_ms']:.1f}",
        ]
        for cell in cells_of(found)
    ]
    return [text, "", *table(heads(columns, left=(0, 2)), rows)]


def mpi_lines(found: Found) -> list[str]:
    """Steps over MPI beside those over gloo."""
    text = (
        "hotrow's training steps over MPI and over gloo, by processes with one thread each, on one machine. CPU: what "
        "the busiest rank took of its processor in a step."
    )
    columns = ("cell", "gloo / MPI", "MPI, ms (CPU)", "gloo, ms (CPU)")
    rows = [
        [
            cell["name"],
            factor(cell),
            _ms(cell, "ours"),
            _ms(cell, "peer"),
        ]
        for cell in cells_of(found)
    ]
    return [text, "", *table(heads(columns, left=(0,)), rows)]


def _ms(cell: Cell, side: str) -> str:
    """Returns the milliseconds of a step on a side and, in brackets, those of the processor, if they were measured."""
    cpu = f" ({cell[f'{side}_cpu_ms']:.3g})" if f"{side}_cpu_ms" in cell else ""
    return f"{cell[f'{side}_ms']:.3g}{cpu}" if f"{side}_ms" in cell else ""


def link_lines(found: Found) -> list[str]:
    """What the network takes of a step."""
    text = (
        "Two ranks in two network namespaces, joined by a link: steps over it, without its limit, and without a "
        "network, with the other rank's answers noted beforehand. What the network takes contains the processor time "
        "of the kernel's TCP."
    )
    columns = ("cell", "link, Gbit/s", "step, ms", "unlimited, ms", "no network, ms", "network's share", "promised")
    rows = [
        [
            cell["name"],
            f"{cell['link_bits_per_s'] / 1e9:.3g}",
            *(f"{cell[key]:.3g}" for key in ("link_ms", "unlimited_ms", "without_ms")),
            f"{cell['not_hidden']:.1%} ({cell['spread'][0]:.1%}-{cell['spread'][1]:.1%})",
            held(f"at most {cell['most']:.0%}", holds=cell["not_hidden"] <= cell["most"], of=cell),
        ]
        for cell in cells_of(found)
    ]
    return [text, "", *table(heads(columns, left=(0, 6)), rows)]
