"""Checkpoints: folders of safetensors files and a manifest. They are complete or absent; damaged ones are refused.

    step-1200/
      manifest.json                      format version, size and crc32 of every file, bytes of the new files, and what
                                         the caller adds
      embedding/<table>/000.safetensors  the rows of a table (checkpoint_rows.py): all of them, or those that were ever
      embedding/<table>/001.safetensors  written to; 001: rows that changed since then, and so on
      sparse_optimizer/<table>/000.safetensors
      model.safetensors  dense_optimizer.safetensors

A checkpoint is made of named parts: an EmbeddingCollection, any nn.Module, any torch optimizer. Tensors are written
from the memory they live in, and read into it, in pieces (checkpoint_files.py), so that saving a table of any size
needs no second copy. Wherever rows lie, and on however many ranks, they load into any other place. A table in split
storage (bfloat16 and lower halves) is joined for the file, which is the same as for a float32 table. Nothing is
pickled. parts.py decides what to save, and when.

If several ranks share the tables, each writes its own rows into files of its own in the one folder. The first rank
writes the rest, and the manifest when all others are done. Each rank reads its own rows.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from hotrow.base.door import check_real, is_taken, is_there, make_folder, remove
from hotrow.base.files import (
    PARTIAL_SUFFIX,
    check_name,
    check_room,
    explain_full_disk,
    file_name,
    is_seen,
    join_crc32,
    sync_folder,
)
from hotrow.base.files import crc32 as crc32_of
from hotrow.embedding import EmbeddingCollection
from hotrow.kernels import ops
from hotrow.optim import SparseOptimizer, SplitSGDBF16
from hotrow.parallel.agreement import CommonError, everyone, on_every_rank, on_first_rank
from hotrow.parallel.communicator import Communicator
from hotrow.parallel.sharded import Sharded
from hotrow.placement.base import Changes, Rows, Saved
from hotrow.run.checkpoint_files import (
    CURE,
    DOCUMENT,
    MANIFEST,
    ChainRecord,
    FileRecord,
    Manifest,
    PartRecord,
    Pieces,
    Stored,
    num_bytes,
    open_tensors,
    read_manifest,
    read_tensors,
    write_tensors,
)
from hotrow.run.checkpoint_rows import (
    NumRows,
    begins_with,
    check_chain,
    link_or_copy,
    load_chain,
    next_chain,
    to_go_on,
    write_in_step,
)

Part: TypeAlias = EmbeddingCollection | nn.Module | Optimizer
T = TypeVar("T")


def save_checkpoint(path: Path | str, parts: Mapping[str, Part], *, extra: Mapping[str, Any] | None = None) -> Path:
    """Writes `parts` and the JSON-ready `extra` as the folder `path`, which appears when it is complete and on disk.

    parts: by name, which becomes a file name. For tables in tiers, only rows that changed since the last checkpoint,
    saved or loaded, are written, if that one held all tables and their optimizer under the same names and is still in
    its folder; otherwise all rows that were ever written to. Tables in DRAM are written whole. If ranks share the
    tables, all of them call this with the same `path`, a folder that they all see; `extra` and what ranks do not share
    come from the first.
    Raises ValueError if `path` exists (checkpoints are never overwritten), if the disk has too little room, saying how
    much is missing, or if another rank failed, naming it; OSError as the disk gives it.
    """
    path, comm = Path(path), _comm_of(parts.values())
    contents = _contents(parts, comm)
    own = [*contents.new.values(), *(arrays for writer, arrays in contents.in_step.values() if writer == comm.rank)]
    needed = sum(everyone(comm, sum(num_bytes(tensor) for tensors in own for tensor in tensors.values())))
    on_first_rank(comm, lambda: _check_room(path, needed))
    manifest = _write(path, contents, extra or {}, comm)
    _continue_from(path, manifest, parts)
    return path


def _check_room(path: Path, needed: int) -> None:
    if path.exists():
        raise ValueError(f"checkpoint {path} exists already; remove it or choose another folder")
    check_room(path, needed, what="checkpoint", cure="move the run")


def _write(path: Path, contents: _Contents, extra: Mapping[str, Any], comm: Communicator) -> Manifest:
    partial = path.with_name(path.name + PARTIAL_SUFFIX)

    def complete() -> None:
        for file, record in files.items():
            if not (partial / file).is_file() or (partial / file).stat().st_size != record.num_bytes:
                raise ValueError(f"{partial / file}, which another rank wrote, is not there as it wrote it; {SHARED}")
        for each in contents.folders:
            sync_folder(partial / each)
        DOCUMENT.write(partial / MANIFEST, replace(manifest, extra=json.loads(json.dumps(dict(extra)))))
        partial.rename(path)
        sync_folder(path.parent)

    try:
        on_first_rank(comm, _explained(comm, partial, lambda: _make_folders(partial, contents)))
        on_every_rank(comm, lambda: _check_seen(partial))
        files: dict[str, FileRecord] = {}
        own, num_own = _writing(comm, partial, lambda: _write_files(partial, contents))
        for file, (writer, arrays) in contents.in_step.items():
            write = functools.partial(write_in_step, partial / file, arrays, writes=comm.rank == writer)
            if (record := _writing(comm, partial, write)) is not None:
                own[file], num_own = record, num_own + record.num_bytes
        for each in everyone(comm, {file: [record.num_bytes, record.crc32] for file, record in own.items()}):
            files |= {file: FileRecord(*record) for file, record in each.items()}
        manifest = Manifest(contents.parts, files, sum(everyone(comm, num_own)), {})
        on_first_rank(comm, _explained(comm, partial, complete))
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return manifest


def _writing(comm: Communicator, folder: Path, function: Callable[[], T]) -> T:
    """What `function` returns, which writes to `folder`, on every rank. See `on_every_rank` and `_explained`."""
    return on_every_rank(comm, _explained(comm, folder, function))


def _explained(comm: Communicator, folder: Path, function: Callable[[], T]) -> Callable[[], T]:
    """`function`, with an error that says what is kept if the disk of a rank is full; alone, the caller says it."""

    def explaining() -> T:
        with explain_full_disk(folder, "saving a checkpoint", "Earlier checkpoints are kept.", "resume the run"):
            return function()

    return function if comm.size == 1 else explaining


SHARED = "all ranks must save to one folder, on a file system that all of them see"


def _make_folders(partial: Path, contents: _Contents) -> None:
    check_real(partial.parent)
    make_folder(partial.parent)
    remove(partial)
    for each in (Path(), *sorted(contents.folders)):
        make_folder(partial / each)


def _check_seen(partial: Path) -> None:
    if not is_seen(partial):
        raise ValueError(f"{partial}, which rank 0 has made, is not here: {SHARED}")


def load_checkpoint(path: Path | str, parts: Mapping[str, Part], *, anew: bool = False) -> dict[str, Any]:
    """Copies the checkpoint at `path` into `parts` after verifying every byte of it; returns its `extra`.

    parts: built as they were when saved, on any placement; some of the saved parts may be left out. If ranks share the
    tables, all of them call this: each verifies a part of the bytes and reads its own rows, whoever wrote them. anew:
    for another run that starts from these weights. Options of optimizers, rates among them, stay as they are, and
    tables may have more rows than were saved, which stay as they are too.
    Raises ValueError naming a file that is missing, cut off or altered, a tensor whose name, shape or dtype does not
    fit, or a part with lower halves from `SplitSGDBF16` that is given to another optimizer.
    """
    path, comm = Path(path), _comm_of(parts.values())
    manifest = on_every_rank(comm, lambda: read_manifest(path))
    verify(path, manifest, comm=comm)
    on_every_rank(comm, lambda: _load(path, manifest, parts, anew=anew))
    _continue_from(path, manifest, parts)
    return dict(manifest.extra)


def _load(path: Path, manifest: Manifest, parts: Mapping[str, Part], *, anew: bool) -> None:
    there = _begin_with(path, manifest, parts, grown=anew)
    for name, part in parts.items():
        if name not in manifest.parts:
            raise ValueError(f"checkpoint {path} has no part {name!r}; it has {', '.join(manifest.parts)}")
        has_tables = isinstance(part, EmbeddingCollection | SparseOptimizer)
        if has_tables != (manifest.parts[name].chains is not None):
            holds = "no embedding tables" if has_tables else "embedding tables"
            raise ValueError(f"checkpoint {path}: part {name!r} holds {holds}; this is a {type(part).__name__}")
        if isinstance(part, Optimizer):
            _restore_optimizer(part, path, name, manifest, there, anew=anew)
        elif isinstance(part, EmbeddingCollection):
            _load_chains(path, manifest, name, part, there, grown=anew)
        else:
            read_tensors(path / f"{name}.safetensors", dict(part.state_dict()))
            ops.flush_denormals(part.parameters())


def _begin_with(path: Path, manifest: Manifest, parts: Mapping[str, Part], *, grown: bool) -> set[tuple[str, str]]:
    """Lets untouched tables in tiers read the checkpoint's files; returns part and table of each such chain."""
    there: set[tuple[str, str]] = set()
    for emb in (part for part in parts.values() if isinstance(part, EmbeddingCollection)):
        changes = emb.placement.changes
        for table, wanted in {} if changes is None else changes.arrays_by_table().items():
            chains = {name: chain for name in parts if (chain := manifest.chain(name, table)) is not None}
            tables = {name: own for name in chains if (own := _tables(parts[name], changes).get(table)) is not None}
            held = [(chains[name], arrays) for name, arrays in tables.items()]
            has_all = sorted(array for arrays in tables.values() for array in arrays) == sorted(wanted)
            if has_all and begins_with(path, table, held, emb.placement, grown=grown):
                there |= {(name, table) for name in tables}
    return there


def verify(path: Path, manifest: Manifest | None = None, *, comm: Communicator | None = None) -> int:
    """Compares every file that the manifest names with its size and crc32; returns the bytes of all.

    comm: ranks that share the work: all call this, and each reads its part of every file. If None, this process alone.
    Raises ValueError naming the first file that is missing, or whose size or checksum differs.
    """
    manifest, comm = read_manifest(path) if manifest is None else manifest, comm or Communicator()
    cuts = [[record.num_bytes * r // comm.size for r in range(comm.size + 1)] for record in manifest.files.values()]
    pieces = everyone(comm, on_every_rank(comm, lambda: _crc32_of_pieces(path, manifest, cuts, comm.rank)))
    for k, (name, record) in enumerate(manifest.files.items()):
        found = pieces[0][k]
        for rank in range(1, comm.size):
            found = join_crc32(found, pieces[rank][k], cuts[k][rank + 1] - cuts[k][rank])
        if (checksum := f"{found:08x}") != record.crc32:
            raise CommonError(
                f"checkpoint file {path / name} has crc32 {checksum}, not {record.crc32}: it is damaged; {CURE}"
            )
    return sum(record.num_bytes for record in manifest.files.values())


def _crc32_of_pieces(path: Path, manifest: Manifest, cuts: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Returns the crc32 of the rank's piece of each file. Raises ValueError if a file is missing or cut off."""
    for name, record in manifest.files.items():
        file = path / name
        if not is_there(file, within=path):
            raise ValueError(f"checkpoint file {file} is missing; use another checkpoint of the run")
        if (size := file.stat().st_size) != record.num_bytes:
            raise ValueError(f"checkpoint file {file} has {size} bytes, not {record.num_bytes}: it is damaged; {CURE}")
    return [crc32_of(path / name, *cuts[k][rank : rank + 2], within=path) for k, name in enumerate(manifest.files)]


def check_chains(path: Path, manifest: Manifest) -> None:
    """Raises ValueError, naming the file, unless the row ids of all chains rise within their tables."""
    for name, part in manifest.parts.items():
        for table in part.chains or {}:
            chain = manifest.chain(name, table)
            assert chain is not None
            check_chain(path, chain)


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Returns the checkpoints `step-N` in `folder` by step, rising. Raises ValueError if it, or one, is a link."""
    found = {}
    check_real(folder)
    for path in folder.glob("step-*"):
        check_real(path)
        number = path.name.removeprefix("step-")
        if number.isdecimal() and is_taken(path / MANIFEST):
            found[int(number)] = path
    return dict(sorted(found.items()))


def steps_without_manifest(folder: Path) -> list[int]:
    """Returns the steps in `folder`, rising, whose checkpoints cannot be read because the manifest is missing."""
    steps = [int(n) for path in folder.glob("step-*") if (n := path.name.removeprefix("step-")).isdecimal()]
    return sorted(set(steps) - set(list_checkpoints(folder)))


def prune_checkpoints(folder: Path, *, keep_last: int, keep: int | None = None) -> list[Path]:
    """Removes all but the newest `keep_last` checkpoints and the one at step `keep`, and leftovers of a killed save."""
    checkpoints = list_checkpoints(folder)
    kept = {*list(checkpoints)[-keep_last:], keep}
    removed = [path for step, path in checkpoints.items() if step not in kept]
    for path in [*removed, *folder.glob(f"step-*{PARTIAL_SUFFIX}")]:
        # The manifest goes first: a removal cut short leaves a folder that no longer counts as a checkpoint.
        remove(path / MANIFEST)
        remove(path)
    return removed


@dataclass
class _Contents:
    """What a checkpoint is made of."""

    parts: dict[str, PartRecord] = field(default_factory=dict)
    new: dict[str, Mapping[str, Stored]] = field(default_factory=dict)
    """Files that this rank writes alone, and their tensors."""
    in_step: dict[str, tuple[int, Mapping[str, Pieces]]] = field(default_factory=dict)
    """Files that one rank writes, which it is, while all read the rows together."""
    kept: dict[str, Saved] = field(default_factory=dict)
    """Files that this rank links, and the checkpoint that has them."""
    folders: set[Path] = field(default_factory=set)
    """Where files of any rank lie, within the checkpoint."""


def _contents(parts: Mapping[str, Part], comm: Communicator) -> _Contents:
    contents = _Contents()
    for name, part in parts.items():
        check_name(name, what="checkpoint part")
        tensors, contents.parts[name] = _describe(part)
        if isinstance(part, EmbeddingCollection | SparseOptimizer):
            contents.folders.add(Path(name))
            chains = _add_chains(contents, name, part, comm)
            contents.parts[name] = replace(contents.parts[name], chains=chains)
        elif comm.rank == 0:
            contents.new[f"{name}.safetensors"] = tensors
    return contents


def _add_chains(contents: _Contents, name: str, part: Part, comm: Communicator) -> dict[str, ChainRecord]:
    """Adds the files of a part's tables; returns their chains."""
    known, tables = _changes(part), _tables(part)
    saved = {changes: _last_one(changes, comm) for changes in dict.fromkeys(known.values()) if changes is not None}

    def of(table: str, arrays: Mapping[str, Rows]) -> NumRows:
        changes, num_rows = known[table], next(iter(arrays.values())).shape[0]
        return (
            NumRows(0, 0)
            if changes is None
            else NumRows.of(changes, table, to_go_on(saved[changes], name, table), num_rows)
        )

    own = on_every_rank(comm, lambda: {table: of(table, arrays) for table, arrays in tables.items()})
    ranks = everyone(comm, own)
    chains: dict[str, ChainRecord] = {}
    for table, arrays in tables.items():
        changes, to_write = known[table], [NumRows(*each[table]) for each in ranks]
        before = None if changes is None else saved[changes]
        found = next_chain(name, table, arrays, changes, before, to_write, comm.rank)
        chains[table] = found.record
        contents.folders.add(Path(name, file_name(table)))
        if changes is not None and (writer := changes.writer(table)) is not None:
            contents.in_step |= {file: (writer, tensors) for file, tensors in found.new.items()}
        else:
            contents.new |= found.new
        if before is not None and comm.rank == 0:
            contents.kept |= dict.fromkeys(found.kept, before)
    return chains


def _comm_of(parts: Iterable[Part]) -> Communicator:
    """Returns the ranks that share tables of the parts; this process alone if none are shared."""
    for part in parts:
        own = (part,) if isinstance(part, EmbeddingCollection) else ()
        for emb in part.collections if isinstance(part, SparseOptimizer) else own:
            if (shared := emb.placement.find(Sharded)) is not None:
                return shared.comm
    return Communicator()


def _last_one(changes: Changes, comm: Communicator) -> Saved | None:
    """Returns the checkpoint that has every row except the changed ones; None if its folder is not as it was, as the
    first rank sees it.
    """
    known = changes.saved is not None and (comm.rank > 0 or _is_as_it_was(changes.saved))
    return changes.saved if all(everyone(comm, known)) else None


def _is_as_it_was(saved: Saved) -> bool:
    path, manifest = saved
    try:
        same = read_manifest(path).files == manifest.files
        return same and all((path / file).stat().st_size == record.num_bytes for file, record in manifest.files.items())
    except (ValueError, OSError):
        return False


def _write_files(folder: Path, contents: _Contents) -> tuple[dict[str, FileRecord], int]:
    """Writes or links the files of this rank in `folder`; returns their sizes and checksums, and the bytes written."""
    copied = sum(link_or_copy(before.path / file, folder / file) for file, before in contents.kept.items())
    records = {file: write_tensors(folder / file, tensors) for file, tensors in contents.new.items()}
    num_written = copied + sum(record.num_bytes for record in records.values())
    return {**{file: before.manifest.files[file] for file, before in contents.kept.items()}, **records}, num_written


def _load_chains(
    path: Path, manifest: Manifest, name: str, part: Part, there: Collection[tuple[str, str]], *, grown: bool
) -> None:
    """Fills the tables of a part. there: part and table of chains whose rows it has already."""
    known = _changes(part)
    for table, arrays in _tables(part).items():
        if (chain := manifest.chain(name, table)) is None:
            raise ValueError(
                f"checkpoint {path} has no table {table!r} in its part {name!r}; load it into the same model"
            )
        load_chain(path, chain, table, arrays, known[table], grown=grown, is_there=(name, table) in there)


def _continue_from(path: Path, manifest: Manifest, parts: Mapping[str, Part]) -> None:
    """Notes which tables in tiers this checkpoint holds completely: the next one writes only their changed rows."""
    saved = Saved(path.absolute(), manifest)
    for changes in {changes for part in parts.values() for changes in _changes(part).values() if changes is not None}:
        held = {
            (table, array)
            for name, part in parts.items()
            for table, arrays in _tables(part, changes).items()
            for array in arrays
            if to_go_on(saved, name, table) is not None
        }
        if held == {(table, array) for table, arrays in changes.arrays_by_table().items() for array in arrays}:
            # In this order: if it is cut short in between, the next checkpoint has rows that did not change.
            changes.saved = saved
            changes.clear_changed()


def _describe(part: Part) -> tuple[dict[str, Tensor], PartRecord]:
    """The tensors of a part, apart from those of its tables, and the rest of it. Of an optimizer of dense weights the
    tensors are named `<parameter index>.<name>`."""
    if isinstance(part, EmbeddingCollection):
        return {}, PartRecord()
    if isinstance(part, SparseOptimizer):
        return {}, PartRecord(param_groups=_plain(Optimizer.state_dict(part)["param_groups"]))
    if not isinstance(part, Optimizer):
        return dict(part.state_dict()), PartRecord()
    state = part.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            (tensors if isinstance(value, Tensor) else values)[f"{index}.{name}"] = value
    return tensors, PartRecord(values=values, param_groups=_plain(state["param_groups"]))


def _tables(part: Part, known: Changes | None = None) -> dict[str, dict[str, Rows]]:
    """By table the arrays of rows of a collection (the weights), or of its optimizer (each state); none of other parts.
    known: only the tables of which it knows the changes."""
    found: dict[str, dict[str, Rows]] = {}
    if isinstance(part, EmbeddingCollection):
        found = {table.name: {"weight": part.rows(table.name)} for table in part.tables}
    if isinstance(part, SparseOptimizer):
        for key, rows in part.state_rows().items():
            index, _, state = key.partition(".")
            found.setdefault(part.param_groups[int(index)]["name"], {})[state] = rows
    changes = _changes(part)
    return {table: arrays for table, arrays in found.items() if known is None or changes[table] is known}


def _changes(part: Part) -> dict[str, Changes | None]:
    """By table what is known of its changed rows; None for one that is saved whole."""
    own = (part,) if isinstance(part, EmbeddingCollection) else ()
    collections = part.collections if isinstance(part, SparseOptimizer) else own
    return {table.name: emb.placement.changes for emb in collections for table in emb.tables}


def _plain(groups: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()} for group in groups
    )


def _restore_optimizer(
    optimizer: Optimizer, path: Path, name: str, manifest: Manifest, there: Collection[tuple[str, str]], *, anew: bool
) -> None:
    """Puts back what `_describe` took apart; state that exists already is filled in place. there: as for
    `_load_chains`. anew: the options of its groups stay, apart from the steps that they count."""
    rest, (tensors, own) = manifest.parts[name], _describe(optimizer)
    file, has_tables, found = path / f"{name}.safetensors", isinstance(optimizer, SparseOptimizer), []
    if not has_tables:
        with open_tensors(file) as opened:
            found = sorted(opened.keys())
    if any(key.endswith(".low") for key in found) and not isinstance(optimizer, SplitSGDBF16):
        # torch's SGD would ignore them as a state it does not know, and continue from the upper halves.
        raise ValueError(
            f"checkpoint {path}: part {name!r} holds lower halves of weights, split by SplitSGDBF16, which a "
            f"{type(optimizer).__name__} would lose; load it into hotrow.SplitSGDBF16, whose weights() are the whole "
            "float32 to go on from with another optimizer"
        )
    groups = _checked_groups(f"{path / MANIFEST}: parts.{name}", rest.param_groups, own.param_groups)
    if anew:
        groups = [
            {key: theirs[key] if key == "steps" else value for key, value in mine.items()}
            for theirs, mine in zip(groups, own.param_groups, strict=True)
        ]
    if isinstance(optimizer, SparseOptimizer):
        _load_chains(path, manifest, name, optimizer, there, grown=anew)
        optimizer.load_rates({"param_groups": groups})
        return
    if found == sorted(tensors):
        read_tensors(file, tensors)
    else:  # torch's Adam and SGD make their state at the first step
        with open_tensors(file) as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  # it is not a mapping
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **rest.values}.items():
        index, _, entry = key.partition(".")
        state.setdefault(int(index), {})[entry] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _checked_groups(where: str, found: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns `found` completed from `own`, the groups of the optimizer, because versions of torch differ in their
    options. Raises ValueError naming an option that is not in `own`, or is of another kind there.
    """
    if len(found) != len(own):
        raise ValueError(f"{where}.param_groups has {len(found)} groups, this model's optimizer {len(own)}; {CURE}")
    for k, (theirs, mine) in enumerate(zip(found, own, strict=True)):
        for name, value in theirs.items():
            at = f"{where}.param_groups.{k}.{name}"
            if name not in mine:
                raise ValueError(f"{at}: this optimizer has no such option; load it into the one that was saved")
            if name in ("params", "name") and value != mine[name]:
                raise ValueError(f"{at} is {value!r}, this model's is {mine[name]!r}; load it into the same model")
            if _kind(value) != _kind(mine[name]):
                raise ValueError(f"{at} is {value!r}, this optimizer's is {mine[name]!r}; {CURE}")
    return [{**mine, **theirs} for theirs, mine in zip(found, own, strict=True)]


def _kind(value: Any) -> Any:
    """Returns what all values of an option have in common: a switch, a text, a number's sign, or a list of these."""
    if isinstance(value, list | tuple):
        return [_kind(each) for each in value]
    if value is None or isinstance(value, bool):
        return "switch"
    return "text" if isinstance(value, str) else ("number", value < 0)
