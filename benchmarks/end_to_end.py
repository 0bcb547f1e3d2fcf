"""Whole training steps of a DLRM: hotrow's against its peers', at the shapes of benchmarks.step_shapes.

    python -m benchmarks.end_to_end --out docs/benchmarks.json [--shape NAME] [--peer NAME] [--dlrm PATH] [--quick]

Both sides of a cell start from the same weights and see the same batches, made beforehand. Losses and probabilities are
compared first, five updates deep; then the steps alternate in one process, on huge pages both. SGD on everything, but
for the peer torchrec-rowwise. Peers are in benchmarks.step_peers; those that are not here are skipped, with the reason.
Measure in an environment that has them all: torchrec wants `pip install --no-deps torchrec` beside extra `bench`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.results import run_as_script
from benchmarks.step_peers import Peer, Step, make_ours, peers
from benchmarks.step_shapes import SHAPES, STEP_OVER_FLOOR, StepShape, floor_s, make_setting
from hotrow import bench, cells


def cell(shape: StepShape, peer: Peer) -> cells.Cell:
    """The comparison of one shape with one peer as a cell of the bench."""
    name = f"train_step_{shape.name}_vs_{peer.name}"

    def build() -> tuple[Step, Step]:
        setting = make_setting(shape)
        ours, parts = make_ours(setting, peer.sparse)
        theirs = peer.build(setting, parts)
        for batch in range(5):  # five updates deep, on different batches
            bench.check_agreement(name, ours, theirs, batch=batch)
        if not ours.last_loss < 10:
            raise ValueError(f"cell {name}: the loss is {float(ours.last_loss):.3g}; lower the shape's learning rate")
        return ours, theirs

    return cells.Cell(
        name=name,
        peer=peer.title,
        build=build,
        limit_s=partial(floor_s, shape, peer.sparse),
        target=shape.targets.get(peer.name),
        most_over_limit=STEP_OVER_FLOOR,
    )


def step_cells(
    shapes: Sequence[str] | None = None,
    chosen: Sequence[str] | None = None,
    *,
    dlrm: Path | None = None,
    quick: bool = False,
) -> list[cells.Cell]:
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
    return [cell(shape, peer) for shape in picked for peer in present]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", action="append", help=f"of {', '.join(SHAPES)}; may be repeated; default: all")
    parser.add_argument("--peer", action="append", help="may be repeated; default: all that can run here")
    parser.add_argument("--dlrm", type=Path, help="a checkout of facebookresearch/dlrm, to measure it too")


def main() -> None:
    """Measure in a fresh process and add the result to the file of results."""
    run_as_script(
        "end_to_end",
        lambda options: step_cells(options.shape, options.peer, dlrm=options.dlrm, quick=options.quick),
        __doc__,
        add_options,
    )


if __name__ == "__main__":
    main()
