"""Whole training steps of a DLRM: hotrow's against its peers', at the shapes of benchmarks.step_shapes.

    python -m benchmarks.end_to_end --out docs/measurements/benchmarks.json [--shape NAME] [--peer NAME] [--dlrm PATH]
    [--quick]

Both sides of a cell start from the same weights and see the same batches, made beforehand. Losses and probabilities are
compared first, five updates deep; then the steps alternate in one process, on huge pages both. SGD on everything, but
for the peer torchrec-rowwise. Peers are in benchmarks.step_peers; those that are not here are skipped, with the reason.
Measure in an environment that has them all: torchrec wants `pip install --no-deps torchrec` beside extra `bench`.

    python -m benchmarks.end_to_end --mkl-as-intel ...

torch multiplies by MKL, which on processors of other makers may take slower code than they can run: on AMD's Zen 5 half
as fast. With this option MKL is told that it is on one of Intel's, as no setting of torch does; a report of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from benchmarks import bench
from benchmarks.compiled import compile_into
from benchmarks.results import run_as_script
from benchmarks.step_peers import Peer, Step, make_ours, peers
from benchmarks.step_shapes import SHAPES, STEP_OVER_FLOOR, StepShape, floor_s, make_setting

AS_INTEL = "--mkl-as-intel"


def cell(shape: StepShape, peer: Peer, *, as_intel: bool = False) -> bench.Cell:
    """The comparison of one shape with one peer as a cell of the bench."""
    name = f"train_step_{shape.name}_vs_{peer.name}" + ("_as_intel" if as_intel else "")

    def build() -> tuple[Step, Step]:
        setting = make_setting(shape)
        ours, parts = make_ours(setting, peer.sparse, peer.ours)
        theirs = peer.build(setting, parts)
        for batch in range(5):  # five updates deep, on different batches
            bench.check_agreement(name, ours, theirs, batch=batch, within=peer.within)
        if not ours.last_loss < 10:
            raise ValueError(f"cell {name}: the loss is {float(ours.last_loss):.3g}; lower the shape's learning rate")
        return ours, theirs

    has_floor = peer.ours == "fp32"
    return bench.Cell(
        name=name,
        peer=peer.title + (", MKL as on Intel's" if as_intel else ""),
        build=build,
        limit_s=partial(floor_s, shape, peer.sparse) if has_floor else lambda _: None,
        target=shape.targets.get(peer.name),
        most_over_limit=STEP_OVER_FLOOR if has_floor else None,
        within=peer.within,
    )


def step_cells(
    shapes: Sequence[str] | None = None,
    chosen: Sequence[str] | None = None,
    *,
    dlrm: Path | None = None,
    as_intel: bool = False,
    quick: bool = False,
) -> list[bench.Cell]:
    """Every shape against every peer that can run here, or the named ones; says on stderr which cannot, and why.

    Raises ValueError for a name that is none.
    """
    known = {peer.name: peer for peer in peers(dlrm)}
    for what, names, allowed in (("shape", shapes, [*SHAPES]), ("peer", chosen, [*known])):
        for name in names or ():
            if name not in allowed:
                raise ValueError(f"no {what} is called {name!r}; choose from {', '.join(allowed)}")
    present = []
    for name in chosen or known:
        if reason := known[name].missing():
            print(f"skipped: peer {name}: {reason}", file=sys.stderr, flush=True)
        else:
            present.append(known[name])
    picked = [SHAPES[name].small() if quick else SHAPES[name] for name in shapes or SHAPES]
    return [cell(shape, peer, as_intel=as_intel) for shape in picked for peer in present]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", help=f"of {', '.join(SHAPES)}; may be repeated; default: all")
    parser.add_argument("--peer", action="append", help="may be repeated; default: all that can run here")
    parser.add_argument("--dlrm", type=Path, help="a checkout of facebookresearch/dlrm, to measure it too")
    parser.add_argument(AS_INTEL, action="store_true", help="have MKL take its code for Intel's processors")


@contextmanager
def mkl_as_intel() -> Iterator[None]:
    """Processes started meanwhile have MKL take the code for Intel's processors."""
    with tempfile.TemporaryDirectory(prefix="hotrow-mkl-") as folder:
        before = os.environ.get("LD_PRELOAD")
        library = str(compile_into(Path(folder), "mkl_as_intel.cpp"))
        os.environ["LD_PRELOAD"] = " ".join([library, *([before] if before else [])])
        try:
            yield
        finally:
            os.environ.pop("LD_PRELOAD")
            if before:
                os.environ["LD_PRELOAD"] = before


def main() -> None:
    """Measure in a fresh process and add the result to the file of results."""
    as_intel = AS_INTEL in sys.argv[1:]
    with mkl_as_intel() if as_intel and "--here" not in sys.argv else nullcontext():
        run_as_script(
            "end_to_end",
            lambda options: step_cells(
                options.shape, options.peer, dlrm=options.dlrm, as_intel=as_intel, quick=options.quick
            ),
            __doc__,
            add_options,
            report="end_to_end_as_intel" if as_intel else None,
        )


if __name__ == "__main__":
    main()
