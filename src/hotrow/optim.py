"""Sparse optimizers: torch.optim.Optimizer subclasses that update only the rows a batch looked up.

    loss.backward(); dense_optimizer.step(); sparse_optimizer.step()

`step()` hands the pending batches of an EmbeddingCollection and their pooled gradients to one native call that sorts,
sums and applies (ops.Kernels.update states the arithmetic). One param group per table, so schedulers just work. Each
works with tables of any dtype; states and arithmetic are float32. `SplitSGDBF16` is for the dense layers beside them.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from hotrow.embedding import EmbeddingCollection, Pending
from hotrow.kernels import ops
from hotrow.kernels.tree import SERIAL
from hotrow.kernels.types import Algorithm, Rule, split, widen
from hotrow.placement.base import Attached, Rows, TableState
from hotrow.tables import TableConfig

OnNonfinite = Literal["raise", "skip"] | None
"""What a step does on a gradient that is NaN or infinite; see `SparseOptimizer`."""


Collections = EmbeddingCollection | Iterable[EmbeddingCollection]


class _Part(NamedTuple):
    """The groups of one collection among those of its optimizer."""

    emb: EmbeddingCollection
    groups: slice


class SparseOptimizer(torch.optim.Optimizer):
    """The base of all optimizers of tables. A param group is one table: `name`, `params` ([weight]), `lr`, `lr_scale`.

    emb: one EmbeddingCollection, or several whose tables have different names. Only the optimizer that was made last
    for a collection may step: `step()` of an earlier one raises ValueError if the collection has gradients.
    A frozen table (`requires_grad_(False)`) collects no gradients, so `step()` leaves it and its state alone.

    The rate of a table is `lr * lr_scale`, rounded to float32. `step()` consumes the pending gradients;
    `zero_grad()` drops them. State tensors keep their place in memory for life, also through `load_state_dict`.

    nonfinite: what a step does if a pooled gradient or a per-id weight is NaN or infinite, which would spread to
    every row it reaches. "raise": ValueError; no row has changed, the gradients stay pending. "skip": the step is left
    out whole, its gradients dropped, `skipped` counts it and the first is a warning. If None, the caller has checked.
    """

    algorithm: Algorithm
    state_names: tuple[str, ...] = ()
    """Names of the state tensors, as in torch.optim: `state[weight][name]`."""
    rule_names: tuple[str, ...] = ("lr", "lr_scale")
    """Entries of a param group that make the update rule of its table."""

    def __init__(self, emb: Collections, *, nonfinite: OnNonfinite = "raise", **defaults: Any) -> None:
        if nonfinite not in ("raise", "skip", None):
            raise ValueError(f"{type(self).__name__}: nonfinite is {nonfinite!r}; choose 'raise', 'skip' or None")
        self.nonfinite = nonfinite
        self.skipped = 0
        """Steps of this object left out because of gradients that were not finite."""
        positive = {"lr", "beta"}
        for name, value in defaults.items():
            if name != "betas" and not (0 < value < math.inf or (value == 0 and name not in positive)):
                allowed = "a positive number" if name in positive else "0 or a positive number"
                raise ValueError(f"{type(self).__name__}: {name} is {value}; it must be {allowed}")
        self._parts = _parts(emb)
        self._complete = False
        groups = [
            {"params": [part.emb.weights[table.name]], "name": table.name, "lr_scale": table.lr_scale}
            for part in self._parts
            for table in part.emb.tables
        ]
        super().__init__(groups, defaults)
        self._complete = True
        self._attached = [self._attach(part) for part in self._parts]
        for part in self._parts:
            part.emb.newest_optimizer = weakref.ref(self)

    def _attach(self, part: _Part) -> Attached:
        """Makes the states of a collection's tables, beside the rows they belong to."""
        placement = part.emb.placement
        states: dict[str, Sequence[TableState]] = {}
        for table, group in zip(part.emb.tables, self.param_groups[part.groups], strict=True):
            made = {name: placement.new_state(table.name, self._row_shape(table)) for name in self.state_names}
            if made:
                self.state[group["params"][0]] = made
            # The formulas hold for rows yet to come too, with the rates of now: schedules may change these.
            states[table.name] = [self._initial(group, TableState(name, array)) for name, array in made.items()]
        return placement.attach(states)

    @property
    def emb(self) -> EmbeddingCollection:
        """The collection. Raises ValueError if the optimizer has several."""
        if len(self._parts) > 1:
            raise ValueError(
                f"this {type(self).__name__} has {len(self._parts)} collections, and here an optimizer may have one: "
                "make an optimizer for each"
            )
        return self._parts[0].emb

    @property
    def collections(self) -> tuple[EmbeddingCollection, ...]:
        return tuple(part.emb for part in self._parts)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's while the optimizer is made. Raises ValueError afterwards: its groups are its tables."""
        if self._complete:
            raise ValueError(
                f"{type(self).__name__} updates tables, one group each: pass several collections when making "
                "the optimizer, and parameters to an optimizer of torch"
            )
        super().add_param_group(param_group)

    def _row_shape(self, table: TableConfig) -> tuple[int, ...]:
        return (table.embedding_dim,)

    def _initial(self, group: dict[str, Any], state: TableState) -> TableState:
        """Returns `state` with what it is for a row that was never touched."""
        return state

    def _rules(self, groups: slice) -> list[Rule]:
        """What this step does to the rows of each table; neighbours of equal numbers, mostly all, share one rule."""
        rules: list[Rule] = []
        before = None
        for group in self.param_groups[groups]:
            numbers = [group[name] for name in self.rule_names]
            rules.append(rules[-1] if numbers == before else self._rule(group))
            before = numbers
        return rules

    def _rule(self, group: dict[str, Any]) -> Rule:
        numbers = {name: group[name] for name in ("eps", "beta", "l1", "l2") if name in group}
        return Rule(algorithm=self.algorithm, lr=_rate(group), **numbers)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every row that the pending batches looked up, once; returns the closure's loss, if one is given.

        Raises ValueError, with no row changed, if a gradient (see `nonfinite`) or a rate is not finite, if another
        optimizer was made for the tables since, or if a pending batch was altered and now holds an id out of range.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        waiting = [k for k, part in enumerate(self._parts) if part.emb.pending]
        if waiting and self._may_step(waiting):
            rules = {k: self._rules(self._parts[k].groups) for k in waiting}  # all of them before a row changes
            for k in waiting:
                self._update(k, rules[k])
        return loss

    def prepare(self) -> Callable[[], None]:
        """Starts the exchange that the next step on the pending batches needs; `step` or `zero_grad` must follow.
        Returns a function that waits for it; `step` waits too."""
        waiting = [k for k, part in enumerate(self._parts) if part.emb.pending]
        begun = [self._parts[k].emb.placement.prepare(self._lookups(k)) for k in waiting]

        def wait() -> None:
            for each in begun:
                each()

        return wait

    def _lookups(self, k: int) -> ops.Lookups:
        emb, still = self._parts[k].emb, self._still_tables(self._parts[k].groups)
        kept = [(emb.kernels_without(p.kernels, still), p.sparse, p.grad) for p in emb.pending]
        return [(kernels, sparse, grad) for kernels, sparse, grad in kept if kernels is not None]

    def _update(self, k: int, rules: list[Rule]) -> None:
        part = self._parts[k]
        part.emb.placement.update(self._lookups(k), self._attached[k], rules)
        self._count_step(part.groups)
        part.emb.clear_pending(updated=True)

    def _may_step(self, waiting: list[int]) -> bool:
        collections = [self._parts[k].emb for k in waiting]
        for emb in collections:
            if (newest := emb.newest_optimizer()) not in (None, self):
                raise ValueError(
                    f"tables {', '.join(emb.weights)} have another optimizer, a {type(newest).__name__} that was made "
                    f"after this {type(self).__name__}: one optimizer updates a collection, so step that one, or "
                    "delete it (del) to go on with this one"
                )
        found = None
        if self.nonfinite is not None:
            each = (emb.placement.agree(nonfinite_gradient(emb)) for emb in collections)
            found = next((text for text in each if text is not None), None)
        if found is None:
            return True
        text = f"{type(self).__name__}: {found}; no row has changed"
        cure = "lower the learning rate, and look for NaN and infinity in dense inputs, labels and per-id weights"
        if self.nonfinite == "raise":
            raise ValueError(f"{text}: {cure}, or have such steps left out (nonfinite='skip')")
        self.zero_grad()
        self.skipped += 1
        if self.skipped == 1:
            warnings.warn(f"{text}, the step is skipped: {cure}; .skipped counts such steps", stacklevel=4)
        return False

    def _still_tables(self, groups: slice) -> frozenset[int]:
        """Numbers of tables, within their collection, that a step leaves as they are."""
        return frozenset()

    def _count_step(self, groups: slice) -> None:
        """After a step that did something to the tables of these groups."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler asks before it steps an optimizer."""
        raise RuntimeError(
            f"torch.amp.GradScaler cannot step {type(self).__name__}: it looks for gradients in parameters, and those "
            "of tables wait in their EmbeddingCollection. Autocast to bfloat16, which needs no scaler; or undo the "
            f"scale yourself: emb.scale_pending(1 / scaler.get_scale()), then {type(self).__name__}.step(), with "
            "nonfinite='skip', before scaler.update()"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Raises TypeError: a copy would belong to the tables of the original."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, since it belongs to its tables: make one for the copy "
            "of the EmbeddingCollection, and load the state_dict() of this one into it"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002
        """Drops the pending gradients (`set_to_none` is torch's; there is no tensor that could be zeroed instead)."""
        for part in self._parts:
            part.emb.clear_pending()

    def attached_to(self, emb: EmbeddingCollection) -> Attached:
        """Returns the states of the tables of `emb`, as its placement has them."""
        return next(own for own, part in zip(self._attached, self._parts, strict=True) if part.emb is emb)

    def state_rows(self) -> dict[str, Rows]:
        """Returns the states, `<number of the group>.<name>`, to be read and written piece by piece."""
        found: dict[str, Rows] = {}
        for part, attached in zip(self._parts, self._attached, strict=True):
            for t, (table, states) in enumerate(attached.states.items(), part.groups.start):
                found |= {f"{t}.{state.name}": part.emb.placement.rows(table, state) for state in states}
        return found

    def follow_weights(self, table: str, start: int = 0) -> None:
        """Gives states that begin with a value made of a row's weight (FTRL's z) the value for its weight now, in the
        rows of `table` from `start` on. Other states stay. If ranks share the table, all of them call this."""
        for formula, weights, stored in self._states_of(table):
            if formula.of_weight or formula.of_sign:
                for rows in stored.pieces(start):
                    stored.write(rows, _of_untouched(formula, weights.read(rows).float(), stored))

    def forget(self, table: str, rows: Tensor) -> None:
        """Gives the states of `rows` of `table`, whose weights are made anew, the values that they have for rows which
        were never looked up. If ranks share the table, all of them call this."""
        for formula, weights, stored in self._states_of(table):
            stored.write(rows, _of_untouched(formula, weights.read(rows).float(), stored))

    def _states_of(self, table: str) -> Iterator[tuple[TableState, Rows, Rows]]:
        """Yields the states of a table: what each is for an untouched row, the rows of the weights, and its own."""
        for part, attached in zip(self._parts, self._attached, strict=True):
            for group in self.param_groups[part.groups]:
                for state in attached.states[table] if group["name"] == table else ():
                    yield self._initial(group, state), part.emb.rows(table), part.emb.placement.rows(table, state)

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Raises ValueError for tables in tiers, whose states may be larger than memory."""
        for part in self._parts:
            part.emb.placement.check("optimizer_state_dict")
        state: dict[int, dict[str, Tensor]] = {}
        for key, rows in self.state_rows().items():
            number, _, name = key.partition(".")
            state.setdefault(int(number), {})[name] = rows.whole()
        return {**super().state_dict(), "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict()` returned: rates and states; for tables in tiers a checkpoint does. Raises
        ValueError if it belongs to other tables or another optimizer; then nothing has changed."""
        for part in self._parts:
            part.emb.placement.check("optimizer_state_dict")
        own = [group["name"] for group in self.param_groups]
        given = [group.get("name") for group in state_dict["param_groups"]]
        if own != given:
            raise ValueError(f"the state is of tables {given}, this optimizer's are {own}; load it into the same model")
        rows = self.state_rows()
        wanted: dict[int, dict[str, tuple[int, ...]]] = {}
        for key, each in rows.items():
            number, _, name = key.partition(".")
            wanted.setdefault(int(number), {})[name] = tuple(each.shape)
        shapes = {i: {n: tuple(t.shape) for n, t in state.items()} for i, state in state_dict["state"].items()}
        if shapes != wanted:
            raise ValueError(
                f"the state is {shapes}, {type(self).__name__} keeps {wanted}; load it into the optimizer that wrote it"
            )
        self.load_rates(state_dict)
        for key, each in rows.items():
            number, _, name = key.partition(".")
            for piece in each.pieces():
                each.write(piece, state_dict["state"][int(number)][name][piece])

    def load_rates(self, state_dict: dict[str, Any]) -> None:
        """Restores the options of the param groups in `state_dict`, rates among them, and no state."""
        kept = dict(self.state)
        # Without the state: torch would cast it to the dtype of the weights.
        super().load_state_dict({**state_dict, "state": {}})
        self.state.update(kept)


def _parts(emb: Collections) -> tuple[_Part, ...]:
    """Raises ValueError if there is no collection, or a table's name is in two of them."""
    collections = [emb] if isinstance(emb, EmbeddingCollection) else list(emb)
    for each in collections:
        if not isinstance(each, EmbeddingCollection):
            raise ValueError(
                f"an optimizer of tables was given a {type(each).__name__}; pass an EmbeddingCollection or several, "
                "and give the parameters of other modules to an optimizer of torch"
            )
    if not collections:
        raise ValueError("an optimizer of tables was given no EmbeddingCollection; pass one or several")
    names = [table.name for each in collections for table in each.tables]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"table {twice[0]!r} is in two of the collections: rename one, or make an optimizer for each collection"
        )
    parts, first = [], 0
    for each in collections:
        parts.append(_Part(each, slice(first, first + len(each.tables))))
        first += len(each.tables)
    return tuple(parts)


def _of_untouched(formula: TableState, weights: Tensor, stored: Rows) -> Tensor:
    """Returns a state of rows with these weights [n, D] that were never looked up."""
    values = formula._replace(array=torch.zeros(len(weights), *stored.shape[1:]))
    values.fill(slice(None), weights)
    return values.array


def _rate(group: dict[str, Any]) -> float:
    rate = float(group["lr"]) * float(group["lr_scale"])
    if not math.isfinite(rate):
        raise ValueError(
            f"table {group['name']!r}: lr is {group['lr']} and lr_scale {group['lr_scale']}; no row has changed: "
            "both must be finite, look at what sets them (a schedule, param_groups)"
        )
    return rate


class SGD(SparseOptimizer):
    """`w = w - lr * g` for each occurrence of a row, in the batch's order (feature, forward pass, bag, position).

    Of batches that are cut into micro-batches, once per row, g the sum of its gradients over them (docs/numerics.md).
    emb: the tables. lr: learning rate, times each table's lr_scale. Raises ValueError unless lr > 0.
    """

    algorithm = "sgd"

    def __init__(self, emb: Collections, lr: float, *, nonfinite: OnNonfinite = "raise") -> None:
        super().__init__(emb, nonfinite=nonfinite, lr=lr)


class Adagrad(SparseOptimizer):
    """`h = h + g * g; w = w - lr * (g / (sqrt(h) + eps))` once per row, g the ordered sum of its gradients.

    `state[weight]["sum"]` is h, [N, D]. Raises ValueError unless lr > 0, eps >= 0 and initial_accumulator_value >= 0.
    """

    algorithm: Algorithm = "adagrad"
    state_names = ("sum",)
    rule_names = ("lr", "lr_scale", "eps")

    def __init__(
        self,
        emb: Collections,
        lr: float,
        *,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        nonfinite: OnNonfinite = "raise",
    ) -> None:
        start = initial_accumulator_value
        super().__init__(emb, nonfinite=nonfinite, lr=lr, eps=eps, initial_accumulator_value=start)

    def _initial(self, group: dict[str, Any], state: TableState) -> TableState:
        return state._replace(constant=float(group["initial_accumulator_value"]))


class RowWiseAdagrad(Adagrad):
    """`h = h + mean(g * g); w = w - (lr / (sqrt(h) + eps)) * g` once per row, g the ordered sum of its gradients.

    One accumulator per row: `state[weight]["sum"]` is h, [N]. Raises ValueError as Adagrad.
    """

    algorithm = "row_wise_adagrad"

    def _row_shape(self, table: TableConfig) -> tuple[int, ...]:
        return ()


class Adam(SparseOptimizer):
    """Row-lazy Adam, as torch.optim.SparseAdam: a row's moments and weights move only when a batch looks it up.

        m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g * g
        w = w - lr * (sqrt(1 - beta2^t) / (1 - beta1^t)) * m / (sqrt(v) + eps)

    once per row, g the ordered sum of its gradients, t the number of steps that found pending batches, this one
    included (`param_group["steps"]` holds those before). `state[weight]`: "exp_avg" m and "exp_avg_sq" v, [N, D].
    Raises ValueError unless lr > 0, eps >= 0 and both betas lie in [0, 1).
    """

    algorithm = "adam"
    state_names = ("exp_avg", "exp_avg_sq")
    rule_names = ("lr", "lr_scale", "eps", "betas", "steps")

    def __init__(
        self,
        emb: Collections,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        nonfinite: OnNonfinite = "raise",
    ) -> None:
        for beta in betas:
            if not 0 <= beta < 1:
                raise ValueError(f"Adam: betas are {betas}; both must lie in [0, 1)")
        super().__init__(emb, nonfinite=nonfinite, lr=lr, eps=eps, betas=tuple(betas))
        for group in self.param_groups:
            group["steps"] = 0

    def _rule(self, group: dict[str, Any]) -> Rule:
        (beta1, beta2), t = group["betas"], group["steps"] + 1
        corrected = _rate(group) * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        return Rule(algorithm="adam", lr=corrected, eps=group["eps"], beta1=beta1, beta2=beta2)

    def _count_step(self, groups: slice) -> None:
        for group in self.param_groups[groups]:
            group["steps"] += 1


class FTRL(SparseOptimizer):
    """FTRL-proximal (McMahan et al., KDD'13), once per row and element, g the ordered sum of the row's gradients:

        z = z + g - (sqrt(n + g * g) - sqrt(n)) / lr * w;  n = n + g * g
        w = 0 if |z| <= l1 else -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)

    `state[weight]`: "z" and "n", [N, D]. z starts at the value from which the line above gives the row's initial w;
    from 0, as in other implementations, the first step would forget it. A schedule that brings a table's lr to 0, by
    which the first line divides, leaves its rows and states as they are. Raises ValueError unless lr and beta are
    positive and l1 and l2 not negative.
    """

    algorithm = "ftrl"
    state_names = ("z", "n")
    rule_names = ("lr", "lr_scale", "beta", "l1", "l2")

    def __init__(
        self,
        emb: Collections,
        lr: float,
        *,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        nonfinite: OnNonfinite = "raise",
    ) -> None:
        super().__init__(emb, nonfinite=nonfinite, lr=lr, beta=beta, l1=l1, l2=l2)

    def _still_tables(self, groups: slice) -> frozenset[int]:
        return frozenset(t for t, group in enumerate(self.param_groups[groups]) if _rate(group) == 0)

    def _initial(self, group: dict[str, Any], state: TableState) -> TableState:
        if state.name != "z":
            return state
        return state._replace(of_weight=-(group["beta"] / _rate(group) + group["l2"]), of_sign=-group["l1"])


class SplitSGDBF16(torch.optim.SGD):
    """Split-SGD-BF16 for dense layers: SGD on float32 weights kept in two halves.

        between steps   parameter = upper 16 bits of w, the rest 0;   state[parameter]["low"] = lower 16 bits, int16
        step            w = both joined;   w = w - lr * (grad + weight_decay * w);   split again

    So forward and backward see bfloat16 values in float32 tensors and compute in float32, while w itself loses nothing.
    Every operation of a step is rounded to float32, so the same gradients give w the same bits on every processor;
    torch.optim.SGD rounds fewer of them if the processor fuses multiply-adds. The tables' counterpart is any optimizer
    above on TableConfig(dtype="bfloat16").

    params: float32 on the cpu; they are split when given. Load weights before, or with the state that belongs to them:
    `load_state_dict` takes the halves of this optimizer, and of torch.optim.SGD's state splits the parameters as they
    stand. `weights()` is w: to go on with another optimizer, copy it into the parameters, because torch's own
    `load_state_dict` would lose the lower halves without a word (`load_checkpoint` refuses). Raises ValueError for
    other parameters and for groups with momentum.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_options(param_group)
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                raise ValueError(
                    f"a parameter is {parameter.dtype} on {parameter.device}; SplitSGDBF16 takes float32 on the cpu"
                )
            self._split(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Takes one step for every parameter that has a gradient; returns the closure's loss, if one is given. Raises
        ValueError if a parameter was changed since it was split, or has a sparse gradient; then nothing has moved."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self._parameters():
            if not ops.are_upper_halves(parameter):
                raise ValueError(
                    f"a parameter {tuple(parameter.shape)} holds more than upper halves: it was loaded or changed "
                    "after this optimizer split it; make the optimizer afterwards, or load its state too"
                )
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"the gradient of a parameter {tuple(parameter.shape)} is sparse; SplitSGDBF16 takes dense ones: "
                    "make its layer with sparse=False, or keep its rows in an EmbeddingCollection"
                )
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            low, grads = [self.state[parameter]["low"] for parameter in moved], [parameter.grad for parameter in moved]
            ops.split_sgd(moved, low, grads, lr=float(group["lr"]), weight_decay=group["weight_decay"])
        return loss

    @torch.no_grad()
    def weights(self) -> list[Tensor]:
        """The weights in full, float32, in the order of the parameters: for export."""
        return [widen(split(p)[0], self.state[p]["low"]) for p in self._parameters()]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores rates and lower halves; without halves (torch.optim.SGD's state) splits the parameters anew."""
        given = {i: entries.get("low") for i, entries in state_dict["state"].items()}
        for i, parameter in enumerate(self._parameters()):
            low = given.get(i)
            if low is not None and (low.dtype != torch.int16 or low.shape != parameter.shape):
                raise ValueError(
                    f"lower halves {i} are {low.dtype} {tuple(low.shape)}, the parameter is {tuple(parameter.shape)}; "
                    "load the state into the model that wrote it"
                )
        for group in state_dict["param_groups"]:
            _check_options(group)
        # Without the state: torch would cast it to the dtype of the parameters.
        super().load_state_dict({**state_dict, "state": {}})
        for i, parameter in enumerate(self._parameters()):
            low = given.get(i)
            if low is None:
                self._split(parameter)
            else:
                self.state[parameter]["low"] = low.clone(memory_format=torch.contiguous_format)

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _split(self, parameter: Tensor) -> None:
        self.state[parameter]["low"] = torch.empty(parameter.shape, dtype=torch.int16)
        ops.split_halves(parameter, self.state[parameter]["low"])


def _check_options(group: Mapping[str, Any]) -> None:
    """Raises ValueError if a group has an option that a step of `SplitSGDBF16` would leave out."""
    for option in ("momentum", "maximize"):
        if group.get(option):
            raise ValueError(
                f"{option} is {group[option]}, but SplitSGDBF16 has only lr and weight_decay: leave {option} out, or "
                "use torch.optim.SGD"
            )


# ---- gradients: of parameters in `.grad`, of tables the pooled gradients that wait in their collections


def nonfinite_gradient(emb: EmbeddingCollection) -> str | None:
    """Returns where the pending gradients of `emb` and their per-id weights first have NaN or infinity, or None. The
    sums that a row gets from many finite gradients are not looked at."""
    for pending in emb.pending:
        found = ops.first_nonfinite(pending.grad)
        if found is not None:
            row, column = found
            feature = next(f for f in pending.kernels.layout.features if f.columns.start <= column < f.columns.stop)
            what = "sample" if emb.placement.kernels.are_pooled(pending.kernels) else "position"
            value = float(pending.grad[row, column])
            return (
                f"the gradient of feature {feature.name!r} (table {emb.tables[feature.table].name!r}), {what} {row}, "
                f"column {column - feature.columns.start} is {value}"
            )
        if pending.sparse.weights is not None and ops.first_nonfinite(pending.sparse.weights) is not None:
            for text in _nonfinite_weights(emb, pending):
                return text
    return None


def _nonfinite_weights(emb: EmbeddingCollection, pending: Pending) -> Iterator[str]:
    """Yields where weights of the looked-up features are not finite; a batch may hold other features."""
    for feature in pending.kernels.layout.features:
        _, offsets, weights = pending.sparse.bags(feature.name)
        assert weights is not None
        found = ops.first_nonfinite(weights)
        if found is not None:
            sample = int(torch.searchsorted(offsets, found[0], right=True)) - 1
            yield (
                f"the weight of feature {feature.name!r} (table {emb.tables[feature.table].name!r}), sample {sample}, "
                f"position {found[0] - int(offsets[sample])} is {float(weights[found[0]])}"
            )


def nonfinite_parameter_gradient(module: nn.Module) -> str | None:
    """Returns where the gradients of the parameters of `module` first have NaN or infinity; if None, nowhere."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and (found := ops.first_nonfinite(parameter.grad)) is not None:
            return f"the gradient of parameter {name!r} at {list(found)} is {float(parameter.grad[found])}"
    return None


@torch.no_grad()
def clip_grad_norm_(
    modules: nn.Module | Iterable[nn.Module],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales the gradients of all parameters and all pending lookups by `min(1, max_norm / (norm + 1e-6))`.

        norm = norm_type-norm of (every parameter's gradient, every pooled gradient of every EmbeddingCollection)

    modules: the model and its collections, or one module that holds them all; what stands in several counts once.
    Returns the norm before clipping, 0-dim, as torch.nn.utils.clip_grad_norm_.

    The sparse side's norm is the norm of the *pooled* gradients [B, output_dim], which exist before the step; the
    gradients of rows would have to be sorted and summed first. If every bag holds one id and no id comes twice, they
    are the same numbers; otherwise a row's gradient is a sum over its bags, and the two norms differ. Both sides are
    scaled by the same factor, and so are the gradients of rows.

    If the norm is NaN or infinite, `error_if_nonfinite` raises ValueError, naming what is not finite; without it
    nothing is scaled, and the optimizers get the gradients as they are. Raises ValueError unless max_norm >= 0.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}; it must be 0 or a positive number")
    roots = [modules] if isinstance(modules, nn.Module) else list(modules)
    parts = list(dict.fromkeys(part for root in roots for part in root.modules()))
    collections = [part for part in parts if isinstance(part, EmbeddingCollection)]
    parameters = dict.fromkeys(parameter for root in roots for parameter in root.parameters())
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    pooled = [pending.grad for emb in collections for pending in emb.pending]
    # Torch leaves a piece to one thread; its norm of a whole strided gradient depends on the number of threads.
    pieces = [piece for grad in [*grads, *pooled] for piece in torch.split(grad.reshape(-1), SERIAL)]
    norm = get_total_norm(pieces, norm_type)
    if not torch.isfinite(norm):
        if error_if_nonfinite:
            places = [*map(nonfinite_gradient, collections), *map(nonfinite_parameter_gradient, roots)]
            where = "; ".join(dict.fromkeys(place for place in places if place)) or "finite gradients overflow in sum"
            raise ValueError(f"the norm of the gradients is {float(norm)}: {where}; lower the learning rate")
        return norm
    factor = max_norm / (float(norm) + 1e-6)
    if factor < 1:
        for grad in grads:
            grad.mul_(factor)
        for emb in collections:
            emb.scale_pending(factor)
    return norm
