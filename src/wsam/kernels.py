"""Fused kernels: one pass to perturb, one to finish, instead of nine.

On CUDA a step need not go through lists of small operations. Here one kernel reads w and the
direction and writes w + d and the copy of w; another reads that copy, both gradients and the base's
state and writes the new weights and state, with the arithmetic of SGD or Adam(W) inside. The foreach
path is the truth they must equal.

A kernel finds its tensors by a table of addresses on the device, see `wsam.tables`.
"""

import functools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from wsam.bases import (
    ADAM,
    COLUMNS,
    KEPT,
    MIX,
    branches_of,
    can_finish,
    history_of,
    hyper_of,
    may_use_kernels,
    numbers_of,
)
from wsam.block import Block, Piece, places
from wsam.geometry import EPSILON
from wsam.launch import Launcher, kernels_work_on
from wsam.plan import TILE, Plan, are_apart
from wsam.rule import Products, Rule
from wsam.tables import Rows, Tables, upload
from wsam.update import Flight

SUMS = 1024
ROOM = 4
"""Numbers that belong to a scale: itself, and a mark. So many keep all of them aligned."""
PLANS = 8
"""How many are kept for each group: one for each set of parameters that have gradients together."""


@dataclass
class Begun:
    """What is known of a block whose step goes by kernels."""

    plan: Plan
    direction: list[Tensor] | None
    """What was squared, until the kernel that goes on with it: it must be given the same list."""
    at: list[int]
    """Where that lies in memory, or lay. g0 lives beside it, so g0 is there only if it is g0."""
    saved: Piece | None
    """Room for a copy of w, until the block has got it."""
    table: Tensor
    """Of w, the direction, and that copy."""


class Kernels:
    """The fused kernels of one recording, or of an optimizer's eager steps.

    `scales` looks at all blocks of a step and begins with them; what it has declined goes on without
    kernels.

    Args:
        device: where the parameters are.
        base: the base optimizer.
        rule: what becomes of the two gradients.
        boost: the geometry's factor on the radius.
    """

    def __init__(self, device: torch.device, base: Optimizer, rule: Rule, boost: float) -> None:
        self._device = device
        self._base, self._rule, self._boost = base, rule, boost
        self.knows_base = can_finish(base)  # whether there is a kernel for its step
        self.stepped_base = False  # whether that was used in this step
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._looked: tuple[list[int], list[int]] = ([], [])
        self._apart = True
        self._begun: dict[int, Begun] = {}
        self._launch = Launcher(device)
        self._tables = Tables(device)
        shape = (len(base.param_groups), COLUMNS)
        self._numbers = torch.zeros(shape, dtype=torch.float64, device=device)
        self._numbers_of = self._numbers.unbind()
        self._written: list[list[float]] = []

    def serves(self, device: torch.device, base: Optimizer, rule: Rule, boost: float) -> bool:
        """Whether these kernels are for such a step, the base's hooks and groups as they are now."""
        same = (self._device, self._rule, self._boost) == (device, rule, boost)
        groups = len(base.param_groups) == len(self._numbers_of)
        return same and groups and self._base is base and self.knows_base == can_finish(base)

    def write_numbers(self) -> None:
        """Copy the groups' present numbers to the device, if they have changed."""
        rows = [numbers_of(group, self._rule, self._boost) for group in self._base.param_groups]
        if rows != self._written:
            self._written = []  # whoever is interrupted writes again
            upload(self._numbers, array("d", chain.from_iterable(rows)))
            self._written = rows

    def begin(self, recording: bool) -> None:
        """Say that a step begins, and whether it is being recorded."""
        self.end()
        self.stepped_base = False
        self._tables.begin(recording)

    def end(self) -> None:
        """Forget the step, and hold none of its memory."""
        self._begun.clear()

    def recorded(self) -> None:
        """Write the addresses of the step that has been recorded."""
        self._tables.recorded()

    def _plan(self, block: Block) -> Plan | None:
        """Return the block's plan; weights that are laid out otherwise than before get a new one.

        None while a step is recorded, when no plan can be made.
        """
        key, weights = tuple(block.numbers), block.weights()
        plan = self._plans.get(key)
        if plan is not None and plan.follow(weights):
            return plan
        if self._tables.recording:
            return None
        if len(self._plans) >= PLANS * len(self._numbers_of):
            self._plans.clear()
        plan = self._plans[key] = Plan(weights, self._device)
        return plan

    def _are_apart(self, plans: Sequence[Plan]) -> bool:
        """Whether no weights share memory: else their order counts, and kernels have none."""
        begins = [address for plan in plans for address in plan.weights]
        sizes = [4 * elements for plan in plans for elements in plan.elements]
        if (begins, sizes) != self._looked:
            self._apart, self._looked = are_apart(begins, sizes), (begins, sizes)
        return self._apart

    def _group(self, block: Block) -> int:
        groups = self._base.param_groups
        return next(i for i, group in enumerate(groups) if group is block.group)

    def scales(
        self, blocks: Sequence[Block], lists: Sequence[list[Tensor]], final: bool = True
    ) -> list[Tensor] | None:
        """Return `radius / (norm + eps)` for each block, with one norm over all lists.

        `final` says that the lists are the directions already, so that the copy of w may be given
        memory and a place in the table. None if the tensors do not fit.
        """
        if any(block.sharded for block in blocks):
            return None
        plans = [plan for block in blocks if (plan := self._plan(block)) is not None]
        if len(plans) < len(blocks) or not self._are_apart(plans):
            return None
        rows = [plan.gradients(z) for plan, z in zip(plans, lists, strict=True)]
        if any(row is None for row in rows):
            return None
        programs = sum(plan.programs for plan in plans)
        partial, first = torch.empty(programs, device=self._device), 0
        for block, plan, z, row in zip(blocks, plans, lists, rows, strict=True):
            assert row is not None
            saved = plan.piece() if final else None
            copy_at = [] if saved is None else [saved.addresses()]
            table = self._tables.table((plan.weights, row, *copy_at))
            self._begun[id(block)] = Begun(plan, z, row, saved, table)
            shape = (plan.where, plan.offset, plan.sizes, partial, first, len(row))
            self._launch("squares", plan.programs, table, *shape, BLOCK=TILE)
            first += plan.programs
        groups = len(self._numbers_of)
        result = torch.empty(ROOM * groups, device=self._device)
        self._launch(
            *("scales", 1),
            *(partial, programs, self._numbers, result, groups),
            EPSILON=EPSILON,
            COLUMNS=COLUMNS,
            ROOM=ROOM,
            GROUPS=1 << (groups - 1).bit_length(),
            BLOCK=SUMS,
        )
        return [result[ROOM * self._group(block)] for block in blocks]

    def save_and_add(self, block: Block, direction: list[Tensor], scale: Tensor) -> bool:
        """`saved = w; w += scale * direction` in one pass; False if the tensors do not fit."""
        begun = self._begun.get(id(block))
        if begun is None or begun.direction is not direction:
            return False
        begun.direction = None  # whoever needs it longer holds it
        plan, table = begun.plan, begun.table
        if begun.saved is None:
            begun.saved = plan.piece()
            table = self._tables.table((plan.weights, begun.at, begun.saved.addresses()))
        given = (table, plan.where, plan.offset, plan.sizes, scale, len(begun.at))
        launch = functools.partial(self._launch, "save_and_add", plan.programs, *given, BLOCK=TILE)
        self._save(block, begun, scale, launch)
        increment_version(block.weights())
        return True

    def _save(
        self, block: Block, begun: Begun, scale: Tensor, launch: Callable[[], object]
    ) -> None:
        """Launch what fills the copy and give it to the block: Ctrl-C may strike before or after."""
        saved, begun.saved = begun.saved, None
        assert saved is not None
        try:
            launch()
            block.saved = saved
        except BaseException:
            if not self._tables.recording and was_used(scale):
                block.saved = saved
            raise

    def finish(self, flight: Flight) -> bool:
        """Restore, combine, step the base and apply what is beside it, in one pass over each block.

        Returns:
            False, with nothing done, where a gradient is missing or tensors do not fit.
        """
        work = []
        for block in flight.blocks:
            lists = self._after_passes(block)
            if lists is None:
                return False
            begun = self._begun[id(block)]
            first, history = self._first(block, begun, lists[2]), self._history(block, begun.plan)
            if first is None or history is None:
                return False
            work.append((block, [*lists, *first], history))
        self._mix_by_products(flight.blocks, [lists for _, lists, _ in work])
        for block, lists, history in work:
            self._finish_block(block, lists, history)
            block.saved = []  # a block is either as it was or as it will be, its history included
        self.stepped_base = True
        return True

    def _after_passes(self, block: Block) -> Rows | None:
        """Return where the copy, the weights and g1 are; None where they do not fit."""
        begun = self._begun.get(id(block))
        if begun is None or not isinstance(block.saved, Piece):
            return None  # the weights are back already, or a mask has left some out
        if not begun.plan.still_serves(block.weights()):  # a pass may have replaced them
            return None
        second = begun.plan.gradients([p.grad for p in block.params])
        return None if second is None else [block.saved.addresses(), begun.plan.weights, second]

    def _first(self, block: Block, begun: Begun, second: Sequence[int] = ()) -> Rows | None:
        """Return where g0 is, nowhere if not kept; None where it does not fit, or g1 is there."""
        if block.first is None:
            return []
        at = places(block.first)
        row = at if at == begun.at else begun.plan.gradients(block.first)
        return None if row is None or {*row}.intersection(second) - {0} else [row]

    def _mix_by_products(self, blocks: Sequence[Block], rows: Sequence[Rows]) -> None:
        """Write the weights of both gradients where they depend on inner products, on the device."""
        hyper = [hyper_of(block.group, self._rule) for block in blocks]
        needy = [self._rule.needs_products(values) for values in hyper]
        if not any(needy):
            return
        products = self._products(blocks, [lists[2:] for lists in rows])
        for block, values, needs in zip(blocks, hyper, needy, strict=True):
            if needs:
                mix = self._rule.mix(values, products)
                numbers = self._numbers_of[self._group(block)]
                for column, value in zip(MIX, (*mix.fed, *mix.beside), strict=True):
                    numbers[column].fill_(value)

    def _products(self, blocks: Sequence[Block], gradients: Sequence[Rows]) -> Products:
        plans = [self._begun[id(block)].plan for block in blocks]
        programs = sum(plan.programs for plan in plans)
        partial, first = torch.empty(3, programs, dtype=torch.float64, device=self._device), 0
        for plan, both in zip(plans, gradients, strict=True):
            shape = (plan.where, plan.offset, plan.sizes, partial, first, programs, len(both[0]))
            self._launch("products", plan.programs, self._tables.table(both), *shape, BLOCK=TILE)
            first += plan.programs
        return Products.of_squares(*partial.sum(1))

    def _finish_block(self, block: Block, lists: Rows, history: Rows) -> None:
        kept = block.first is not None
        lists = [*lists[:3], lists[3] if kept else lists[2]]
        self._step("finish", block, [*lists, *history], branches=KEPT * kept)

    def begin_lean(
        self, flight: Flight, directions: Sequence[tuple[list[Tensor], Tensor, bool]]
    ) -> bool:
        """Step the base, move to w + d and keep the step's result less g1, in one pass.

        Returns:
            False, with nothing done, where tensors do not fit.
        """
        work = []
        for block, (direction, scale, _) in zip(flight.blocks, directions, strict=True):
            begun = self._begun.get(id(block))
            if begun is None or begun.direction is not direction:
                return False
            history, first = self._history(block, begun.plan), self._first(block, begun)
            if history is None or not first:
                self.end()  # or the room for copies would be held besides the one that is needed
                return False
            work.append((block, [begun.plan.weights, *first, begun.at], scale, history))
        for block, lists, scale, history in work:
            try:
                self._begin_lean(block, lists, scale, history)
            finally:
                flight.stepped = flight.stepped or isinstance(block.saved, Piece)
        self.stepped_base = True
        return True

    def _begin_lean(self, block: Block, lists: Rows, scale: Tensor, history: Rows) -> None:
        begun = self._begun[id(block)]
        begun.direction = None
        begun.saved = begun.saved or begun.plan.piece()
        lists = [*lists, begun.saved.addresses(), *history]
        launch = functools.partial(self._step, "begin_lean", block, lists, scale)
        self._save(block, begun, scale, launch)

    def end_lean(self, flight: Flight) -> bool:
        """`w = saved - lr * sharp * g1`; False, with nothing done, where tensors do not fit."""
        found = [self._after_passes(block) for block in flight.blocks]
        if None in found:
            return False
        for block, lists in zip(flight.blocks, found, strict=True):
            self._end_lean(block, lists or [])
        return True

    def _end_lean(self, block: Block, lists: Rows) -> None:
        self._step("end_lean", block, lists)

    def _history(self, block: Block, plan: Plan) -> Rows | None:
        """Return where the base's state is; None where the kernels cannot step it."""
        if not self.knows_base:
            return None
        lists = history_of(self._base, block.group, block.params, self._device)
        if lists is None:
            return None
        rows = [plan.addresses(tensors) for tensors in lists]
        return None if None in rows else [row for row in rows if row is not None]

    def _step(
        self, kernel: str, block: Block, rows: Rows, *more: Tensor, branches: int = 0
    ) -> None:
        steps, flags = [], {}
        if kernel != "end_lean":  # which has nothing of the base's
            branches |= branches_of(self._base, block.group)
            flags = {"BRANCHES": branches}
            if branches & ADAM:
                steps = [self._base.state[p]["step"] for p in block.params]
                rows = [*rows, places(steps)]
        plan = self._begun[id(block)].plan
        numbers = self._numbers_of[self._group(block)]
        shape = (plan.where, plan.offset, plan.sizes, numbers, *more, len(block.params))
        table = self._tables.table(rows)
        self._launch(kernel, plan.programs, table, *shape, **flags, BLOCK=TILE)
        if steps:  # last: a kernel that cannot be made must leave all as it was
            torch._foreach_add_(steps, 1)
        increment_version(block.weights())


def was_used(scale: Tensor) -> bool:
    """Whether a kernel has gone on with a scale; waits for the device.

    `scales` writes a zero behind each, that kernel a one. A group has one scale, and one block here.
    """
    return bool(scale.as_strided((), (), scale.storage_offset() + 1))


def for_eager_steps(
    base: Optimizer, rule: Rule, boost: float, device: torch.device, known: "Kernels | None"
) -> "Kernels | None":
    """Return kernels for a step that is not recorded, ready to begin; None where they do not serve.

    They serve where the base may step by them: whoever has chosen `foreach` or `fused=False` gets that.

    Args:
        base: the base optimizer.
        rule: what becomes of the two gradients.
        boost: the geometry's factor on the radius.
        device: where all parameters are.
        known: what the last call returned, to be used again.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        return None
    if not may_use_kernels(base, rule):
        return None
    if device.index != torch.cuda.current_device():
        return None
    if torch.cuda.is_current_stream_capturing() or not kernels_work_on(device):
        return None
    if known is None or not known.serves(device, base, rule, boost):
        known = Kernels(device, base, rule, boost)
    known.begin(recording=False)
    known.write_numbers()
    return known
