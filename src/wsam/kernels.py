"""Fused kernels: one pass to perturb, one to finish, instead of nine.

A step that is recorded into a CUDA graph, or whose base is fused, need not go through lists of small
operations. Here one kernel reads w and the direction and writes w + d and the copy of w; another
reads that copy, both gradients and the base's state and writes the new weights and state, with the
arithmetic of SGD or Adam(W) inside. The foreach path is the truth they must equal.

A kernel finds its tensors by a table of addresses on the device. While a step is recorded nothing
may be copied from the host, so the addresses of that step are written once it has been recorded. An
eager step writes those that have changed.
"""

import functools
import importlib.util
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from wsam.bases import COLUMNS, can_finish, constants_of, history_of, numbers_of
from wsam.block import Block, Piece
from wsam.checks import warn
from wsam.perturb import EPSILON
from wsam.plan import TILE, Plan, are_aligned, places
from wsam.rule import Rule
from wsam.state import PREFIX
from wsam.update import Flight

WARPS = 8
SUMS = 1024
PLANS = 8
"""How many plans are kept; as many as there are sets of parameters that have gradients together."""
TILES = {"BLOCK": TILE, "num_warps": WARPS}
Rows = list[list[int]]
"""Addresses of the tensors of some lists."""


@functools.cache
def available() -> bool:
    """Whether Triton is there to make the kernels."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def work_on(device: torch.device) -> bool:
    """Whether Triton can make a kernel for the device: it needs a compiler and a GPU it knows."""
    if not available():
        return False
    ones, partial = torch.ones(4, device=device), torch.zeros(1, device=device)
    plan = Plan([ones], device)
    table = torch.tensor([ones.data_ptr()], device=device)
    try:
        from wsam import _triton

        shape = (plan.where, plan.offset, plan.sizes, partial, 1)
        _triton.squares[(1,)](table, *shape, **TILES)
    except Exception as error:  # whatever it is, training goes on without
        warn(f"Triton is installed and cannot make kernels, so steps go without: {error}")
        return False
    return float(partial) == 4.0


class Kernels:
    """The fused kernels of one recording, or of an optimizer's eager steps, with their tables.

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
        self._looked: set[tuple[int, ...]] = set()
        self._known: Rows = []
        self._places: list[int] = []
        self._apart = True
        self._tables: dict[int, tuple[Tensor, list[int]]] = {}
        self._next = 0
        self._pending: list[tuple[Tensor, list[int]]] | None = None
        shape = (len(base.param_groups), COLUMNS)
        self._numbers = torch.zeros(shape, dtype=torch.float64, device=device)
        self._written: list[list[float]] = []

    def serves(self, device: torch.device, base: Optimizer, rule: Rule, boost: float) -> bool:
        """Whether these kernels are for such a step, the base's hooks and groups as they are now."""
        same = (self._device, self._rule, self._boost) == (device, rule, boost)
        groups = len(base.param_groups) == len(self._numbers)
        return same and groups and self._base is base and self._knows_base == can_finish(base)

    def write_numbers(self) -> None:
        """Copy the groups' present numbers to the device, if they have changed."""
        rows = [numbers_of(group, self._rule, self._boost) for group in self._base.param_groups]
        if rows != self._written:
            self._numbers.copy_(torch.tensor(rows, dtype=torch.float64), non_blocking=True)
            self._written = rows

    def begin(self, recording: bool) -> None:
        """Say that a step begins, and whether it is being recorded."""
        self._next = 0
        self._looked.clear()
        self._known.clear()
        self._pending = [] if recording else None

    def recorded(self) -> None:
        """Write the addresses of the step that has been recorded."""
        for table, addresses in self._pending or []:
            table.copy_(_on_host(addresses))
        self._pending = None

    def _table(self, rows: Sequence[list[int]]) -> Tensor:
        """Return a table of addresses on the device, one row a list of tensors."""
        addresses = [address for row in rows for address in row]
        position, self._next = self._next, self._next + 1
        table, written = self._tables.get(position, (None, []))
        if table is None or table.numel() != len(addresses):
            assert self._pending is None, "a recorded step asks for other tables than an eager one"
            table = torch.zeros(len(addresses), dtype=torch.int64, device=self._device)
            written = []
        if self._pending is not None:
            self._pending.append((table, addresses))
        elif written != addresses:
            table.copy_(_on_host(addresses), non_blocking=True)
            self._tables[position] = (table, addresses)
        return table

    def _plan(self, block: Block) -> Plan:
        """Return the block's plan; weights that were replaced since the last step get a new one."""
        key = tuple(block.numbers)
        plan = self._plans.get(key)
        if plan is not None and (key in self._looked or self._pending is not None):
            return plan
        weights = block.weights()
        if plan is None or not plan.is_for(weights):
            if len(self._plans) >= PLANS:
                self._plans.clear()
            plan = self._plans[key] = Plan(weights, self._device)
        self._looked.add(key)
        row = places(weights)
        if are_aligned(row):  # else they are to be looked at, and refused
            self._known.append(row)
        return plan

    def _look_for_overlaps(self, blocks: Sequence[Block]) -> None:
        """Find out whether weights share memory: then their order counts, and kernels have none."""
        weights = [w for block in blocks for w in block.weights()]
        begins = places(weights)
        if begins == self._places:
            return
        self._places, self._apart, end = begins, True, 0
        for begin, size in sorted(zip(begins, (w.nbytes for w in weights), strict=True)):
            self._apart = self._apart and (begin >= end or not size)
            end = max(end, begin + size)

    def _group(self, block: Block) -> int:
        groups = self._base.param_groups
        return next(i for i, group in enumerate(groups) if group is block.group)

    def scales(self, blocks: Sequence[Block], lists: Sequence[list[Tensor]]) -> list[Tensor] | None:
        """Return `radius / (norm + eps)` for each block, with one norm over all lists.

        None if the tensors do not fit.
        """
        if any(block.sharded for block in blocks):
            return None
        self._look_for_overlaps(blocks)
        plans = [self._plan(block) for block in blocks]
        rows = [self._row(plan, z) for plan, z in zip(plans, lists, strict=True)]
        if not self._apart or any(row is None for row in rows):
            return None
        from wsam import _triton

        programs = [plan.programs for plan in plans]
        partial = torch.empty(sum(programs), device=self._device)
        parts = torch.split(partial, programs)
        for plan, part, row in zip(plans, parts, rows, strict=True):
            assert row is not None
            shape = (plan.where, plan.offset, plan.sizes, part, len(row))
            _triton.squares[(plan.programs,)](self._table((row,)), *shape, **TILES)
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

    def save_and_add(self, block: Block, direction: list[Tensor], scale: Tensor) -> bool:
        """`saved = w; w += scale * direction` in one pass; False if the tensors do not fit."""
        rows = self._rows(block, [block.weights(), direction])
        if rows is None:
            return False
        from wsam import _triton

        plan = self._plan(block)
        saved = plan.piece()
        shape = (plan.where, plan.offset, plan.sizes, scale.float(), len(saved))
        table = self._table((*rows, saved.addresses()))
        self._save(
            block, saved, lambda: _triton.save_and_add[(plan.programs,)](table, *shape, **TILES)
        )
        increment_version(block.weights())
        return True

    def _save(self, block: Block, saved: Piece, launch: Callable[[], object]) -> None:
        """Launch what fills `saved` and give it to the block: Ctrl-C may strike before or after."""
        if self._pending is not None:  # nothing runs while a step is recorded
            launch()
            block.saved = saved
            return
        saved.mark_empty()
        try:
            launch()
            block.saved = saved
        except BaseException:
            if not saved.is_empty():
                block.saved = saved
            raise

    def finish(self, flight: Flight) -> bool:
        """Restore, combine, step the base and apply what is beside it, in one pass over each block.

        Returns:
            False, with nothing done, where a gradient is missing or tensors do not fit.
        """
        if [id(block) for block in flight.moved] != [id(block) for block in flight.blocks]:
            return False  # the weights are back already, or a mask has left some where they were
        if any(block.first is None for block in flight.blocks):
            self._known.clear()  # g0 is gone, and others may be in its place
        work = []
        for block in flight.blocks:
            kept = [block.first] if block.first is not None else []
            lists = [block.saved, block.weights(), [p.grad for p in block.params], *kept]
            history = self._history(block)
            rows = None if history is None else self._rows(block, [*lists, *history])
            if rows is None:
                return False
            work.append((block, rows[: len(lists)], rows[len(lists) :]))
        for block, lists_at, history_at in work:
            self._finish_block(block, lists_at, history_at)
        return True

    def _finish_block(self, block: Block, lists: Rows, history: Rows) -> None:
        kept = block.first is not None
        lists = [*lists[:3], lists[3] if kept else lists[2]]
        self._launch("finish", block, [*lists, *history], KEPT=kept)

    def begin_lean(
        self, flight: Flight, directions: Sequence[tuple[list[Tensor], Tensor, bool]]
    ) -> bool:
        """Step the base, move to w + d and keep the step's result less g1, in one pass.

        Returns:
            False, with nothing done, where tensors do not fit.
        """
        work = []
        for block, (direction, scale, _) in zip(flight.blocks, directions, strict=True):
            history = self._history(block)
            lists = [block.weights(), block.first or [], direction]
            rows = None if history is None else self._rows(block, [*lists, *history])
            if rows is None:
                return False
            work.append((block, rows[:3], scale, rows[3:]))
        for block, lists_at, scale, history_at in work:
            try:
                self._begin_lean(block, lists_at, scale, history_at)
            finally:
                flight.stepped = flight.stepped or bool(block.saved)
        return True

    def _begin_lean(self, block: Block, lists: Rows, scale: Tensor, history: Rows) -> None:
        saved = self._plan(block).piece()
        lists = [*lists, saved.addresses(), *history]
        self._save(block, saved, lambda: self._launch("begin_lean", block, lists, scale.float()))

    def end_lean(self, flight: Flight) -> bool:
        """`w = saved - lr * sharp * g1`; False, with nothing done, where tensors do not fit."""
        self._known.clear()
        work = []
        for block in flight.blocks:
            lists = [block.saved, block.weights(), [p.grad for p in block.params]]
            rows = self._rows(block, lists) if self._knows_base else None
            if rows is None:
                return False
            work.append((block, rows))
        for block, rows in work:
            self._end_lean(block, rows)
        return True

    def _end_lean(self, block: Block, lists: Rows) -> None:
        self._launch("end_lean", block, lists)

    def _rows(self, block: Block, lists: Sequence[Sequence[Any] | Piece]) -> Rows | None:
        """Return the addresses of each list's tensors; None where they do not fit."""
        if block.sharded or not self._apart:
            return None
        plan, rows = self._plan(block), []
        for tensors in lists:
            row = self._row(plan, tensors)
            if row is None:
                return None
            rows.append(row)
        return rows

    def _row(self, plan: Plan, tensors: Sequence[Any] | Piece) -> list[int] | None:
        row = plan.addresses(tensors, self._known)
        if row is not None:
            self._known.append(row)
        return row

    def _history(self, block: Block) -> list[list[Any]] | None:
        """Return the base's state as lists; None where the kernels cannot step it."""
        if not self._knows_base:
            return None
        return history_of(self._base, block.group, block.params, self._device)

    def _launch(self, kernel: str, block: Block, rows: Rows, *more: Tensor, **flags: bool) -> None:
        from wsam import _triton

        steps = []
        if kernel != "end_lean":  # which has nothing of the base's
            flags |= constants_of(self._base, block.group)
            if flags["ADAM"]:
                steps = [self._base.state[p]["step"] for p in block.params]
                rows = [*rows, places(steps)]
        plan = self._plan(block)
        numbers = self._numbers[self._group(block)]
        shape = (plan.where, plan.offset, plan.sizes, numbers, *more, len(block.params))
        run = getattr(_triton, kernel)[(plan.programs,)]
        run(self._table(rows), *shape, **flags, **TILES)
        if steps:  # last: a kernel that cannot be made must leave all as it was
            torch._foreach_add_(steps, 1)
        increment_version(block.weights())


def _on_host(addresses: list[int]) -> Tensor:
    """Return a tensor of many integers, for which `torch.tensor` takes its time."""
    return torch.frombuffer(array("q", addresses), dtype=torch.int64)


def for_eager_steps(
    base: Optimizer, rule: Rule, boost: float, device: torch.device, known: "Kernels | None"
) -> "Kernels | None":
    """Return kernels for a step that is not recorded, ready to begin; None where they do not serve.

    They serve where the base is fused: whoever has chosen `fused=True` wants few launches, and takes
    it that nobody hears of the base's own step.

    Args:
        base: the base optimizer.
        rule: what becomes of the two gradients.
        boost: the geometry's factor on the radius.
        device: where all parameters are.
        known: what the last call returned, to be used again.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return None
    names = ("lr", *(PREFIX + name for name in ("rho", *rule.hyper())))
    for group in base.param_groups:
        if not group.get("fused") or any(isinstance(group[name], Tensor) for name in names):
            return None
    if device.index != torch.cuda.current_device() or "step" in base.__dict__:
        return None
    if torch.cuda.is_current_stream_capturing() or not work_on(device):
        return None
    if known is None or not known.serves(device, base, rule, boost):
        known = Kernels(device, base, rule, boost)
    known.begin(recording=False)
    known.write_numbers()
    return known
