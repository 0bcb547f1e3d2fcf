"""The lowest rate of phases at which swaps of hot rows take a small share of the time, as predicted for a machine.

Two swaps, whose rows a cold and a hot phase are expected to change, stand beside the steps of both phases. They count
as if none of their work were hidden behind steps. Measured times decide nothing, so that runs repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.costs.declared import LIKELY
from hotrow.costs.hardware import Gpu, Hardware
from hotrow.hot.hot_set import HotSet
from hotrow.hot.order import HIGHEST, LOWEST
from hotrow.placement.copies import MAX_LISTED

SWAP_SHARE = 0.05
"""The largest share of the time of phases that swaps may take."""


def lowest_rate(
    first: float, hot: HotSet, counts: Mapping[str, NDArray[Any]], machine: Hardware, gpu: Gpu, *, epoch_s: float
) -> float:
    """Returns a rate between LOWEST and HIGHEST at which swaps take at most SWAP_SHARE of the time: `first` halved as
    long as that holds, or doubled until it does. epoch_s: seconds of all steps of an epoch; the others are those of
    `swaps_s`."""

    def fits(percent: float) -> bool:
        return swaps_s(hot, counts, machine, gpu, share=percent / 100) <= SWAP_SHARE * epoch_s * percent / 100

    rate = first
    while rate < HIGHEST and not fits(rate):
        rate = min(HIGHEST, 2 * rate)
    while rate > LOWEST and fits(lower := max(LOWEST, rate / 2)):
        rate = lower
    return rate


def swaps_s(hot: HotSet, counts: Mapping[str, NDArray[Any]], machine: Hardware, gpu: Gpu, *, share: float) -> float:
    """Returns the seconds of a swap to the GPU and one back, each after phases of this share of an epoch.

    counts: by table, the accesses of each row in an epoch, at random times; a table without counts changes whole.
    """
    link_bytes = dram_bytes = 0.0  # a row is read and written in a table and in pinned memory, each way
    for name, rows in hot.rows.items():
        num_bytes, passes = float(rows.num_rows * hot.record_bytes[name]), 4
        if name in counts:
            own = np.concatenate([counts[name][: rows.prefix], counts[name][rows.listed]])
            if (changed := -float(np.expm1(-share * own).sum())) <= MAX_LISTED * rows.num_rows:
                num_bytes, passes = changed * hot.record_bytes[name], 4 * 3  # see MAX_LISTED
        link_bytes, dram_bytes = link_bytes + num_bytes, dram_bytes + passes * num_bytes
    link_s = link_bytes * (1 / gpu.to_device_bytes_per_s.value + 1 / gpu.to_host_bytes_per_s.value)
    dram_s = dram_bytes / max(figure.value for figure in machine.stream_bytes_per_s.values())
    return link_s + dram_s + 16 * len(hot.rows) * LIKELY.launch_s  # four calls for weights and four for a state, twice
