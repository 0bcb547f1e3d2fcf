"""What a run says and records when a session begins: where rows lie, what is hot, and what is not as it should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import torch

from hotrow.base.files import disk_free_bytes, size
from hotrow.base.machine import lacks_bfloat16_products, usable_cores
from hotrow.base.progress import num_of
from hotrow.hot.hot_set import HotSet
from hotrow.kernels import ops
from hotrow.parallel.shards import pooled_tables
from hotrow.placement.tiers import Tiers
from hotrow.run.meters import Notice, warning
from hotrow.run.storage import describe, disk_shortfall
from hotrow.run.trainer import Training
from hotrow.run.trial_record import kept_trial
from hotrow.setup.demand import required_bytes
from hotrow.setup.device import storage_line
from hotrow.setup.setup import Setup
from hotrow.setup.shards import shards_line


def say_what_was_decided(training: Training) -> None:
    """Says and records, on the first rank, what this session begins with."""
    folder, setup, config, backend = training.folder, training.setup, training.config, ops.backend()
    emb, device = training.parts.embedding, training.turns.device
    where = describe(emb, required_bytes(config, setup.held)) + training.parts.dense.line()
    where += "" if device is None else f"; copies of hot rows on {device}, up to {config.hot.budget}"
    if setup.shards:
        training.say(f"{shards_line(emb.tables, setup.shards, training.comm.size)}; of rank 0:")
    training.say(f"{describe_threads(setup.ranks.local_size)}; {where}")
    folder.write_config(config.to_yaml())  # only now, when all of it is known to fit: a later resume starts from it
    folder.rewind(training.state.step)
    folder.open_tensorboard(step=training.state.step)
    training.tell(_doubts(training))
    folder.update(
        status="running",
        error=None,  # these are of a session before
        signal=None,
        write_budget=None,
        dataset={"path": config.data, "checksum": setup.dataset.checksum, "name": setup.dataset.info.name},
        rows={name: split.num_rows for name, split in setup.dataset.splits.items()},
        seeds={"train.seed": config.train.seed},
        trial=kept_trial(setup),
        backend=asdict(backend),
        tables_bytes=sum(table.num_bytes for table in emb.tables),
        batches_dropped=0,
    )
    if config.train.precision != "fp32":
        training.say(f"train.precision {config.train.precision}: {storage_line(config, training.parts.dense)}")
    verb = "resumed at" if training.state.step else "training from"
    training.say(
        f"{folder.path}: {verb} step {training.state.step} of {training.num_steps}, {backend.name} kernels "
        f"({backend.isa}, {num_of(backend.threads, 'thread')})"
    )


def describe_threads(num_processes: int = 1) -> str:
    """How many threads torch and the kernels use, and how to use all cores, for the first line of a run.

    num_processes: processes of the run that share these cores.
    """
    used, cores = torch.get_num_threads(), usable_cores() // num_processes
    if used >= cores:
        return num_of(used, "thread")
    return f"{num_of(used, 'thread')} of {cores} cores (train.threads: {cores} uses all)"


def _doubts(training: Training) -> Iterator[Notice]:
    """Warnings about what was decided; those that are shown need an answer of the user."""
    setup, config, backend = training.setup, training.config, ops.backend()
    if setup.shards and (wire_dtype := config.parallel.wire_dtype) != "fp32":
        text = f"rows and gradients of tables travel as {wire_dtype}, which rounds them: results are inexact, and "
        yield from warning(f"{text}depend on the number of ranks (parallel.wire_dtype)", "inexact_wire")
    if backend.reason is not None:
        yield Notice(backend.reason, "reference_backend")
    if backend.threads < torch.get_num_threads():
        text = "this process was forked after hotrow's kernels were loaded: they use one thread"
        yield Notice(text, "forked_process")
    yield from _of_hot_rows(training)
    yield from _of_preparation(setup)
    yield from _of_few_rows(training)
    if unused := config.hot.unused():
        text = f"hot.schedule is {config.hot.schedule}, which does not use {', '.join(unused)}"
        yield from warning(text, "unused_hot_options")
    if setup.short_of_memory is not None:
        yield from warning(setup.short_of_memory, "memory_may_run_out")
    yield from _of_disks(training)
    dense = training.parts.dense
    if dense.dtype == "bf16" and dense.device.type == "cpu" and lacks_bfloat16_products():
        text = (
            "train.dense_dtype is 'bf16', but this processor has no products of bfloat16: torch converts instead, "
            "which is slower than float32, without AVX-512 many times; fp32 in a new run is faster and more exact"
        )
        yield from warning(text, "slow_bfloat16")


def _of_hot_rows(training: Training) -> Iterator[Notice]:
    """Which rows are hot, if that is known when the session begins, and what of them is not as it should be."""
    if (found := training.turns.found) is None:
        return
    if not training.dataset.has_counts:
        text = f"{training.config.data} carries no counts: its training split was counted to find hot rows"
        yield Notice(text, "counted_to_find_hot_rows")
    facts, seconds = found.to_json(), found.calibration.seconds + found.classify_s
    yield Notice(
        f"hot: {facts['hot_rows']:,} rows ({facts['name']}) in {facts['hot_bytes']:,} of {facts['budget_bytes']:,} "
        f"bytes, {facts['hot_samples']:.1%} of the samples; found in {seconds:.2f} s"
    )
    if text := training.turns.nothing_hot:
        yield from warning(text, "no_hot_samples")
    if training.setup.shards and training.config.hot.takes_turns:
        yield from _of_hot_rows_on_ranks(training.setup, found.rows)


def _of_hot_rows_on_ranks(setup: Setup, hot: HotSet) -> Iterator[Notice]:
    """Hot rows that ranks still ask each other for, and inexact sums."""
    config = setup.config.hot
    if beyond := hot.num_beyond({name: shard.prefix for name, shard in setup.shards.items()}):
        pooled = pooled_tables(setup.shards)
        why = (
            f"parallel.exchange is pooled for {', '.join(pooled)}: {beyond:,} hot rows are not on every rank"
            if pooled
            else f"hot.rows is {config.rows}: {beyond:,} hot rows are not among the first of their tables, which every "
            "rank holds"
        )
        text = f"{why}, so that hot batches ask other ranks for them, as cold ones do"
        yield from warning(text, "hot_rows_not_on_every_rank")
    if config.merge_every > 1:
        text = (
            f"hot.merge_every is {config.merge_every}: in hot phases each rank updates hot rows alone for so many "
            "steps, which is not exact: weights depend on the number of ranks and on when the run saves and evaluates"
        )
        yield from warning(text, "inexact_merging")


def _of_preparation(setup: Setup) -> Iterator[Notice]:
    """What was said when the data was prepared: it was said then, and a run's reader may not have seen it."""
    summary = setup.dataset.info.summary
    if skipped := summary.get("rows_skipped"):
        text = f"{skipped} bad rows were left out when {setup.config.data} was prepared"
        yield Notice(text, "rows_skipped", 1)
    notes = summary.get("notes")
    for code, texts in notes.items() if isinstance(notes, dict) else ():
        if isinstance(texts, list):
            yield Notice("; ".join(map(str, texts)), code, len(texts))


def _of_few_rows(training: Training) -> Iterator[Notice]:
    """Splits that have too few rows to judge a model by."""
    for name in ("val", "test"):
        split = training.dataset.splits.get(name)
        for place, label in enumerate(split.info.labels) if split is not None and split.num_rows else ():
            assert split is not None
            labels = (split.block(i).labels[place] for i in range(split.num_blocks))
            for code, text in training.parts.objective.too_few(labels, name).items():
                first = place == 0
                said, named = (text, code) if first else (f"{label.name}: {text}", f"{code}_of_{label.name}")
                yield from warning(said, named, 1)


def _of_disks(training: Training) -> Iterator[Notice]:
    """Disks that may become full, and stores that do without io_uring."""
    if (tiers := training.parts.embedding.placement.find(Tiers)) is not None:
        fallbacks = [store.fallback for store in tiers.stores if store.fallback]
        if fallbacks:
            text = f"tables on disk are read and written by threads, which takes more of the processor: {fallbacks[0]}"
            yield Notice(text, "stores_without_io_uring", len(fallbacks))
        if short := disk_shortfall(tiers):
            yield from warning(short, "disk_may_become_full")
    path, most = training.folder.path, training.writes.checkpoint_bytes
    if most > (free := disk_free_bytes(path)):
        text = (
            f"a checkpoint may take {size(most)}, and {size(free)} are free in {path}: training ends at the first "
            "checkpoint that does not fit; free some space, or stop and start the run elsewhere"
        )
        yield from warning(text, "disk_may_be_too_small_for_a_checkpoint")
