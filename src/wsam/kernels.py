"""Fused kernels for recorded steps: one pass to perturb, one to finish, instead of nine.

A step that is recorded into a CUDA graph need not go through lists of small operations. Here one
kernel reads w and the direction and writes w + d and the copy of w; another reads that copy, both
gradients and the base's state and writes the new weights and state, with the arithmetic of SGD or
Adam(W) inside. The foreach path is the truth they must equal.

A kernel finds its tensors by a table of addresses on the device. While a step is recorded nothing
may be copied from the host, so the addresses of that step are written once it has been recorded.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wsam.block import Block, direction_of
from wsam.perturb import EPSILON
from wsam.rule import Rule
from wsam.state import PREFIX
from wsam.update import Flight

TILE = 2048
WARPS = 8
SUMS = 1024
COLUMNS = 8
"""Of the numbers of a group; six are used, eight keep a row aligned."""
TILES = {"BLOCK": TILE, "num_warps": WARPS}
BASES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def available() -> bool:
    """Whether Triton is there to make the kernels."""
    return importlib.util.find_spec("triton") is not None


def can_finish(base: Optimizer) -> bool:
    """Whether the base's arithmetic is one of those the kernels know."""
    plain = type(base) in BASES and not base._optimizer_step_pre_hooks
    known = not any(g.get("amsgrad") or g.get("maximize") for g in base.param_groups)
    return plain and known and not base._optimizer_step_post_hooks


def fit(*lists: Sequence[Tensor]) -> bool:
    """Whether kernels may walk the tensors of all lists side by side, as plain memory."""
    for tensors in zip(*lists, strict=True):
        first = tensors[0]
        plain = (t.dtype == torch.float32 and t.data_ptr() % 16 == 0 for t in tensors)
        alike = (t.stride() == first.stride() for t in tensors)
        if not (all(plain) and all(alike) and _is_dense(first)):
            return False
    return True


def _is_dense(tensor: Tensor) -> bool:
    pairs = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in pairs:
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class Plan:
    """Which program of a kernel does which part of which tensor."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        where, offset = [], []
        for index, tensor in enumerate(tensors):
            for start in range(0, tensor.numel(), TILE):
                where.append(index)
                offset.append(start)
        self.programs = len(where)
        self.where = torch.tensor(where, dtype=torch.int32, device=device)
        self.offset = torch.tensor(offset, dtype=torch.int64, device=device)
        self.sizes = torch.tensor([t.numel() for t in tensors], dtype=torch.int64, device=device)


def numbers_of(group: dict[str, Any], rule: Rule, boost: float) -> list[float]:
    """Return a group's radius, what is fed, what is beside, and the learning rate."""
    hyper = {name: group[PREFIX + name] for name in rule.hyper()}
    row = [direction_of(group) * group[PREFIX + "rho"] * boost]
    if not rule.needs_products(hyper):  # else the kernels only perturb
        mix = rule.mix(hyper, None)
        row += [float(value) for value in (*mix.fed, *mix.beside, group["lr"])]
    return row + [0.0] * (COLUMNS - len(row))


class Kernels:
    """The fused kernels of one recording, with their tables of addresses.

    Every step asks for the same tables in the same order: `begin` starts again with the first.

    Args:
        device: where the parameters are.
        base: the base optimizer.
        rule: what becomes of the two gradients.
        boost: the geometry's factor on the radius.
    """

    def __init__(self, device: torch.device, base: Optimizer, rule: Rule, boost: float) -> None:
        self._device = device
        self._base, self._rule, self._boost = base, rule, boost
        self._knows_base = can_finish(base)
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._tables: list[Tensor] = []
        self._next = 0
        self._pending: list[tuple[Tensor, list[int]]] | None = None
        self._numbers = torch.zeros(len(base.param_groups), COLUMNS, device=device)
        self._written: list[list[float]] = []

    def write_numbers(self) -> None:
        """Copy the groups' present numbers to the device, if they have changed."""
        rows = [numbers_of(group, self._rule, self._boost) for group in self._base.param_groups]
        if rows != self._written:
            self._numbers.copy_(torch.tensor(rows), non_blocking=True)
            self._written = rows

    def begin(self, recording: bool) -> None:
        """Say that a step begins, and whether it is being recorded."""
        self._next = 0
        self._pending = [] if recording else None

    def recorded(self) -> None:
        """Write the addresses of the step that has been recorded."""
        for table, addresses in self._pending or []:
            table.copy_(torch.tensor(addresses, dtype=torch.int64))
        self._pending = None

    def _table(self, lists: Sequence[Sequence[Tensor]]) -> Tensor:
        addresses = [t.data_ptr() for tensors in lists for t in tensors]
        while self._next >= len(self._tables) or self._tables[self._next].numel() != len(addresses):
            assert self._pending is None, "a recorded step asks for other tables than an eager one"
            fresh = torch.zeros(len(addresses), dtype=torch.int64, device=self._device)
            self._tables[self._next :] = [fresh]
        table = self._tables[self._next]
        self._next += 1
        if self._pending is None:
            table.copy_(torch.tensor(addresses, dtype=torch.int64))
        else:
            self._pending.append((table, addresses))
        return table

    def _plan(self, block: Block, tensors: Sequence[Tensor]) -> Plan:
        key = tuple(block.numbers)
        if key not in self._plans:
            self._plans[key] = Plan(tensors, self._device)
        return self._plans[key]

    def _group(self, block: Block) -> int:
        groups = self._base.param_groups
        return next(i for i, group in enumerate(groups) if group is block.group)

    def scales(self, blocks: Sequence[Block], lists: Sequence[list[Tensor]]) -> list[Tensor] | None:
        """Return `radius / (norm + eps)` for each block, with one norm over all lists.

        None if the tensors do not fit.
        """
        if any(block.sharded for block in blocks) or not all(fit(tensors) for tensors in lists):
            return None
        from wsam import _triton

        plans = [self._plan(block, z) for block, z in zip(blocks, lists, strict=True)]
        programs = [plan.programs for plan in plans]
        partial = torch.empty(sum(programs), device=self._device)
        parts = torch.split(partial, programs)
        for plan, part, z in zip(plans, parts, lists, strict=True):
            shape = (plan.where, plan.offset, plan.sizes, part, len(z))
            _triton.squares[(plan.programs,)](self._table((z,)), *shape, **TILES)
        groups = len(self._numbers)
        result = torch.empty(groups, device=self._device)
        _triton.scales[(1,)](
            *(partial, len(partial), self._numbers, result, groups),
            EPSILON=EPSILON,
            COLUMNS=COLUMNS,
            GROUPS=1 << (groups - 1).bit_length(),
            BLOCK=SUMS,
            num_warps=WARPS,
        )
        return [result[self._group(block)] for block in blocks]

    def save_and_add(
        self, block: Block, direction: list[Tensor], scale: Tensor
    ) -> list[Tensor] | None:
        """`saved = w; w += scale * direction` in one pass; None if the tensors do not fit."""
        weights = block.weights()
        if block.sharded or not fit(weights, direction):
            return None
        from wsam import _triton

        saved = [torch.empty_like(w) for w in weights]
        plan = self._plan(block, weights)
        table = self._table((weights, direction, saved))
        shape = (plan.where, plan.offset, plan.sizes, scale.float(), len(weights))
        _triton.save_and_add[(plan.programs,)](table, *shape, **TILES)
        return saved

    def finish(self, flight: Flight) -> bool:
        """Restore, combine, step the base and apply what is beside it, in one pass over each block.

        Returns:
            False, with nothing done, where a gradient is missing or tensors do not fit.
        """
        moved = {
            number: s for b in flight.moved for number, s in zip(b.numbers, b.saved, strict=True)
        }
        work = []
        for block in flight.blocks:
            saved = [moved.get(number) for number in block.numbers]
            kept = [block.first] if block.first is not None else []
            lists: list[Any] = [saved, block.weights(), [p.grad for p in block.params], *kept]
            history = self._history(block, lists)
            if history is None:
                return False
            work.append((block, lists, history))
        for block, lists, history in work:
            self._finish_block(block, lists, history)
        return True

    def _finish_block(self, block: Block, lists: list[Any], history: list[list[Tensor]]) -> None:
        kept = block.first is not None
        lists = [*lists[:3], lists[3] if kept else lists[2]]
        self._launch("finish", block, [*lists, *history], self._constants(block), KEPT=kept)

    def begin_lean(
        self,
        blocks: Sequence[Block],
        directions: Sequence[tuple[list[Tensor], Tensor, bool]],
    ) -> bool:
        """Step the base, move to w + d and keep the step's result less g1, in one pass.

        Returns:
            False, with nothing done, where tensors do not fit.
        """
        work = []
        for block, (direction, scale, _) in zip(blocks, directions, strict=True):
            lists = [block.weights(), block.first or [], direction]
            history = self._history(block, lists)
            if history is None:
                return False
            work.append((block, lists, scale, history))
        for block, lists, scale, history in work:
            self._begin_lean(block, lists, scale, history)
        return True

    def _begin_lean(
        self, block: Block, lists: list[list[Tensor]], scale: Tensor, history: list[list[Tensor]]
    ) -> None:
        block.saved = [torch.empty_like(w) for w in lists[0]]
        lists = [*lists, block.saved, *history]
        self._launch("begin_lean", block, lists, self._constants(block), scale.float())

    def end_lean(self, flight: Flight) -> bool:
        """`w = saved - lr * sharp * g1`; False, with nothing done, where tensors do not fit."""
        work = []
        for block in flight.blocks:
            lists: list[Any] = [block.saved, block.weights(), [p.grad for p in block.params]]
            if not self._knows_base or not _walkable(block, lists):
                return False
            work.append((block, lists))
        for block, lists in work:
            self._end_lean(block, lists)
        return True

    def _end_lean(self, block: Block, lists: list[Any]) -> None:
        self._launch("end_lean", block, lists, {})

    def _history(self, block: Block, lists: Sequence[Sequence[Any]]) -> list[list[Tensor]] | None:
        """Return the base's state as lists; None where the kernels cannot step it."""
        if not self._knows_base:
            return None
        names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
        if isinstance(self._base, torch.optim.SGD):
            names = ("momentum_buffer",) if block.group["momentum"] else ()
        states = [self._base.state.get(p, {}) for p in block.params]
        history = [[state.get(name) for state in states] for name in names]
        return history if _walkable(block, [*lists, *history]) else None

    def _constants(self, block: Block) -> dict[str, Any]:
        """Return the base's arithmetic as constants of a kernel."""
        group, names = block.group, "ABCDE"
        if isinstance(self._base, torch.optim.SGD):
            keys = ("weight_decay", "momentum", "dampening", "nesterov")
            values = [*(group[key] for key in keys), 0]
            return {"ADAM": False, **dict(zip(names, values, strict=True))}
        decoupled = isinstance(self._base, torch.optim.AdamW) or bool(
            group.get("decoupled_weight_decay")
        )
        values = [group["weight_decay"], decoupled, *group["betas"], group["eps"]]
        return {"ADAM": True, **dict(zip(names, values, strict=True))}

    def _launch(
        self,
        kernel: str,
        block: Block,
        lists: list[Any],
        constants: dict[str, Any],
        *more: Tensor,
        **flags: bool,
    ) -> None:
        from wsam import _triton

        if constants.get("ADAM"):
            steps = [self._base.state[p]["step"] for p in block.params]
            torch._foreach_add_(steps, 1)
            lists = [*lists, steps]
        plan = self._plan(block, block.weights())
        numbers = self._numbers[self._group(block)]
        shape = (plan.where, plan.offset, plan.sizes, numbers, *more, len(block.params))
        run = getattr(_triton, kernel)[(plan.programs,)]
        run(self._table(lists), *shape, **flags, **constants, **TILES)


def _walkable(block: Block, lists: Sequence[Sequence[Any]]) -> bool:
    whole = not any(tensor is None for tensors in lists for tensor in tensors)
    return whole and not block.sharded and fit(*lists)
