"""Fused CUDA kernels: one pass over memory to perturb and one to finish, instead of nine.

One kernel reads w and the direction and writes w + d and a copy of w. Another reads that copy, both
gradients and the base's state and writes the new weights and state, with the arithmetic of SGD or
Adam(W) inside. The results must equal those of `wsam._core.step`.
"""

import functools
import importlib.util
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from wsam._core import step
from wsam._core.mix import Mix, Products
from wsam._core.param_blocks import EPSILON, Block
from wsam._core.param_groups import rule_values
from wsam._core.step import KEPT, Direction
from wsam._core.step_state import Action, Phase, StepState
from wsam._core.validation import warn
from wsam.accel.base_optimizers import (
    ADAM,
    COLUMNS,
    DECAY,
    DECOUPLED_DECAY,
    HAS_G0,
    KEEP,
    MIX_COLUMNS,
    PRECONDITION,
    REUSE,
    branches_of,
    has_kernel,
    is_base_only,
    keeps_difference,
    may_use_kernels,
    mix_on_host,
    numbers_of,
    reuse_needs_norms,
    state_lists,
)
from wsam.accel.tensor_table import (
    TILE,
    AddressTables,
    Rows,
    WeightBuffer,
    WorkPlan,
    data_ptrs,
    no_overlap,
    upload,
)
from wsam.rule import Rule

WARPS = 8
SUM_BLOCK = 1024
SCALE_STRIDE = 4
"""Distance between the scales of two groups, which keeps each aligned to 16 bytes."""
PLANS = 8
"""Plans kept for each group: one for each set of parameters that have gradients together."""


BlockLists = tuple[Block, WorkPlan, Rows]
"""A block, its plan, and the addresses of its tensors."""


@dataclass
class KernelBlock:
    """A block whose step uses kernels."""

    plan: WorkPlan
    g0_at: list[int]
    """Addresses of g0."""
    direction_at: list[int]
    """Addresses of S g0, which are those of g0 in a ball."""
    buffer: WeightBuffer | None
    """Memory for a copy of w, until the block owns it."""
    table: Tensor
    """Addresses of w, the direction and the copy."""


class TritonBackend:
    """The fused kernels of one recording, or of the eager steps of an optimizer.

    Args:
        device: of all parameters.
        base: the base optimizer.
        rule: the optimizer's rule.
        boost: the geometry's factor of the radius.
        reuses: whether the steps have one pass and a kept vector.
    """

    def __init__(
        self,
        device: torch.device,
        base: Optimizer,
        rule: Rule,
        boost: float,
        reuses: bool = False,
    ) -> None:
        self._device = device
        self._base, self._rule, self._boost, self._reuses = base, rule, boost, reuses
        self._needs_norms = reuses and reuse_needs_norms(rule)
        self.has_base_kernel = has_kernel(base)
        self.stepped_base = False
        """Whether a kernel made the base's step."""
        self._plans: dict[tuple[int, ...], WorkPlan] = {}
        self._overlap_checked: tuple[list[int], list[int]] = ([], [])
        self._no_overlap = True
        self._kernel_blocks: dict[int, KernelBlock] = {}
        self._launch = Launcher(device)
        self._tables = AddressTables(device)
        shape = (len(base.param_groups), COLUMNS)
        self._numbers = torch.zeros(shape, dtype=torch.float64, device=device)
        self._rows = self._numbers.unbind()
        self._written: list[list[float]] = []

    def fits(self, base: Optimizer, rule: Rule, boost: float) -> bool:
        """Whether this backend was created for such a step."""
        same = self._base is base and (self._rule, self._boost) == (rule, boost)
        groups = len(base.param_groups) == len(self._rows)
        return same and groups and self.has_base_kernel == has_kernel(base)

    def write_numbers(self) -> None:
        """Upload the groups' current numbers, if they have changed."""
        rows = [
            numbers_of(group, self._mix(group), self._boost) for group in self._base.param_groups
        ]
        if rows != self._written:
            self._written = []  # so that an interrupted upload is repeated
            upload(self._numbers, array("d", chain.from_iterable(rows)))
            self._written = rows

    def _mix(self, group: dict[str, Any]) -> Mix | None:
        return mix_on_host(rule_values(group, self._rule), self._rule, self._reuses)

    def begin(self, recording: bool) -> None:
        """Begin a step."""
        self.stepped_base = False
        self._tables.begin(recording)

    def recorded(self) -> None:
        """Upload the addresses of the step that was recorded."""
        self._tables.recorded()

    # w -> w + d ---------------------------------------------------------------------------------

    def perturb(self, state: StepState) -> bool:
        """Move the weights to w + d; with `lean` also step the base."""
        try:
            return self._perturb(state)
        except BaseException:
            self._kernel_blocks.clear()  # frees the buffers
            raise

    def _perturb(self, state: StepState) -> bool:
        self._kernel_blocks.clear()
        blocks = state.blocks
        plain = state.mask is None and state.geometry.follows_g0
        if not plain or any(block.sharded for block in blocks):
            return False
        if state.lean and (not self.has_base_kernel or self._is_base_only_somewhere()):
            return False
        plans = self._find_plans(blocks)
        if plans is None:
            return False
        whitened, roots = step.whiten(state, blocks)
        scales = self._scales(blocks, plans, whitened, final=not any(roots))
        if scales is None and state.lean:
            return False
        scales = scales or step.scales_of(state, blocks, whitened)
        directions = step.unwhiten(whitened, roots, scales)
        del roots  # before the copies of w are allocated
        if state.lean:
            return self._begin_lean(state, directions)
        state.moved = list(blocks)
        for block, direction in zip(blocks, directions, strict=True):
            if not self._save_and_add(block, *direction):
                step.save_and_move(block, direction)
        return True

    def _is_base_only_somewhere(self) -> bool:
        groups = self._base.param_groups
        return any(is_base_only(group, self._rule, self._reuses) for group in groups)

    def _find_plans(self, blocks: Sequence[Block]) -> list[tuple[WorkPlan, list[int]]] | None:
        """Return for each block a plan and the addresses of g0; None if kernels cannot be used."""
        plans = [plan for block in blocks if (plan := self._find_plan(block)) is not None]
        if len(plans) < len(blocks) or not self._have_no_overlap(plans):
            return None
        found = []
        for plan, block in zip(plans, blocks, strict=True):
            addresses = plan.gradient_addresses(block.g0)
            if addresses is None:
                return None
            found.append((plan, addresses))
        return found

    def _find_plan(self, block: Block) -> WorkPlan | None:
        key, weights = tuple(block.indices), block.weights()
        plan = self._plans.get(key)
        if plan is not None and plan.fits(weights):
            return plan
        if self._tables.recording:
            return None
        if len(self._plans) >= PLANS * len(self._rows):
            self._plans.clear()
        plan = self._plans[key] = WorkPlan(weights, self._device)
        return plan

    def _have_no_overlap(self, plans: Sequence[WorkPlan]) -> bool:
        """Whether no weights share memory: the order of updates would matter."""
        addresses = [address for plan in plans for address in plan.weights]
        sizes = [4 * elements for plan in plans for elements in plan.elements]
        if (addresses, sizes) != self._overlap_checked:
            self._no_overlap = no_overlap(addresses, sizes)
            self._overlap_checked = (addresses, sizes)
        return self._no_overlap

    def _row(self, block: Block) -> int:
        groups = self._base.param_groups
        return next(i for i, group in enumerate(groups) if group is block.group)

    def _scales(
        self,
        blocks: Sequence[Block],
        plans: Sequence[tuple[WorkPlan, list[int]]],
        lists: Sequence[list[Tensor]],
        final: bool,
    ) -> list[Tensor] | None:
        """Return `radius / (norm + eps)` for each block, with one norm over all lists.

        Args:
            blocks: all blocks of the step.
            plans: for each block its plan and the addresses of g0.
            lists: what is squared.
            final: whether `lists` are g0 and also the directions, because S = 1. Their tables then
                include the copy of w, and `_save_and_add` uses them again.
        """
        rows = []
        for (plan, g0), z in zip(plans, lists, strict=True):
            row = g0 if final else plan.gradient_addresses(z)
            if row is None:
                return None
            rows.append(row)
        programs = sum(plan.programs for plan, _ in plans)
        partial, first = torch.empty(programs, device=self._device), 0
        for block, (plan, g0), row in zip(blocks, plans, rows, strict=True):
            buffer = plan.buffer() if final else None
            copy_at = [] if buffer is None else [buffer.addresses()]
            table = self._tables.table((plan.weights, row, *copy_at))
            self._kernel_blocks[id(block)] = KernelBlock(plan, g0, row, buffer, table)
            shape = (plan.where, plan.offset, plan.sizes, partial, first, len(row))
            self._launch("squares", plan.programs, table, *shape, BLOCK=TILE)
            first += plan.programs
        groups = len(self._rows)
        result = torch.empty(SCALE_STRIDE * groups, device=self._device)
        self._launch(
            *("scales", 1),
            *(partial, programs, self._numbers, result, groups),
            EPSILON=EPSILON,
            COLUMNS=COLUMNS,
            STRIDE=SCALE_STRIDE,
            GROUPS=1 << (groups - 1).bit_length(),
            BLOCK=SUM_BLOCK,
        )
        return [result[SCALE_STRIDE * self._row(block)] for block in blocks]

    def _save_and_add(self, block: Block, direction: list[Tensor], scale: Tensor) -> bool:
        """Compute `saved = w; w += scale * direction` in one pass.

        Returns:
            False, with nothing changed, if `_scales` has returned None.
        """
        known = self._kernel_blocks.get(id(block))
        if known is None:
            return False
        plan, table, buffer = known.plan, known.table, known.buffer
        if buffer is None:
            buffer = plan.buffer()
            table = self._tables.table((plan.weights, known.direction_at, buffer.addresses()))
        shape = (plan.where, plan.offset, plan.sizes, scale, len(known.direction_at))
        self._launch("save_and_add", plan.programs, table, *shape, BLOCK=TILE)
        block.saved, known.buffer = buffer, None
        increment_version(block.weights())
        return True

    # w + d -> the end of the step ---------------------------------------------------------------

    def finish(self, state: StepState) -> bool:
        """Restore, combine, step the base and apply the decoupled term, in one pass over each block."""
        if state.phase is not Phase.PERTURBED or self._is_base_only_somewhere():
            return False
        if state.base_stepped:
            return self._end_lean(state)
        found = self._lists_of_one_pass(state) if self._reuses else self._lists_of_two_passes(state)
        if found is None:
            return False
        keeps = bool(self._rule.reuse) and not self._reuses
        work = []
        for block, plan, lists in found:
            base_state = self._state_rows(block, plan)
            kept = self._kept_addresses(state, block, plan) if keeps else []
            if base_state is None or kept is None:
                return False
            work.append((block, plan, lists, base_state, kept))
        if not self._reuses:
            self._mix_from_products(found)
        for block, plan, lists, base_state, kept in work:
            self._finish_block(block, plan, lists, base_state, kept)
            block.saved = None  # the block is now complete, its state included
            if keeps:
                state.memory.mark_written(block.params, KEPT)
        if self._reuses:
            for p, g in step.gradients_of(state.blocks):
                p.grad = g
        self.stepped_base = True
        return True

    def _lists_of_two_passes(self, state: StepState) -> list[BlockLists] | None:
        """Return the addresses of saved w, w, g1 and, where the rule keeps it, g0.

        Returns:
            The addresses for each block, or None if kernels cannot be used.
        """
        reuses = self._rule.reuse
        if reuses and not all(keeps_difference(b.group, self._rule) for b in state.blocks):
            return None
        found = []
        for block in state.blocks:
            lists = self._rows_after_passes(block)
            if lists is None:
                return None
            known = self._kernel_blocks[id(block)]
            found.append((block, known.plan, [*lists, *([known.g0_at] if block.g0 else [])]))
        return found

    def _lists_of_one_pass(self, state: StepState) -> list[BlockLists] | None:
        """Return the addresses of w, w, g0 and the kept vector.

        The kernel reads saved weights from the first list, and a step with one pass saves none.

        Returns:
            The addresses for each block, or None if kernels cannot be used.
        """
        sharded = any(block.sharded for block in state.blocks)
        plans = None if sharded or self._needs_norms else self._find_plans(state.blocks)
        if plans is None:
            return None
        found = []
        for block, (plan, g0) in zip(state.blocks, plans, strict=True):
            kept = self._kept_addresses(state, block, plan)
            if kept is None:
                return None
            found.append((block, plan, [plan.weights, plan.weights, g0, kept]))
        return found

    def _kept_addresses(self, state: StepState, block: Block, plan: WorkPlan) -> list[int] | None:
        return plan.state_addresses(state.memory.stored(block, KEPT))

    def _rows_after_passes(self, block: Block) -> Rows | None:
        """Return the addresses of the saved weights, the weights and g1; None if they do not fit."""
        known = self._kernel_blocks.get(id(block))
        if known is None or not isinstance(block.saved, WeightBuffer):
            return None
        if not known.plan.fits(block.weights()):
            return None
        g1 = known.plan.gradient_addresses([p.grad for p in block.params])
        return None if g1 is None else [block.saved.addresses(), known.plan.weights, g1]

    def _state_rows(self, block: Block, plan: WorkPlan) -> Rows | None:
        """Return the addresses of the base's state; None if kernels cannot step the base."""
        if not self.has_base_kernel:
            return None
        lists = state_lists(self._base, block.group, block.params, self._device)
        if lists is None:
            return None
        rows = [plan.state_addresses(tensors) for tensors in lists]
        return None if None in rows else [row for row in rows if row is not None]

    def _mix_from_products(self, found: Sequence[BlockLists]) -> None:
        """Compute coefficients that depend on inner products, on the device."""
        values = [rule_values(block.group, self._rule) for block, _, _ in found]
        projected = [self._rule.needs_products(value) for value in values]
        if not any(projected):
            return
        products = self._products(found)
        for (block, _, _), value, needed in zip(found, values, projected, strict=True):
            if needed:
                mix = self._rule.mix(value, products)
                numbers = self._rows[self._row(block)]
                parts = (*mix.base_grad, *mix.decoupled)
                for column, coefficient in zip(MIX_COLUMNS, parts, strict=True):
                    numbers[column].fill_(coefficient)

    def _products(self, found: Sequence[BlockLists]) -> Products:
        programs = sum(plan.programs for _, plan, _ in found)
        partial, first = torch.empty(3, programs, dtype=torch.float64, device=self._device), 0
        for block, plan, (_, _, *gradients) in found:
            table, n = self._tables.table(gradients), len(block.params)
            shape = (plan.where, plan.offset, plan.sizes, partial, first, programs, n)
            self._launch("products", plan.programs, table, *shape, BLOCK=TILE)
            first += plan.programs
        return Products.of_squares(*partial.sum(1))

    def _finish_block(
        self, block: Block, plan: WorkPlan, lists: Rows, base_state: Rows, kept: list[int]
    ) -> None:
        has_g0, more = len(lists) > 3, PRECONDITION * self._rule.precondition
        rows = [*lists, *([] if has_g0 else [lists[2]]), *base_state]
        branches = HAS_G0 * has_g0 | more | KEEP * bool(kept) | REUSE * self._reuses
        self._step_block("finish", block, plan, rows, branches=branches, kept=kept)

    # The lean step ------------------------------------------------------------------------------

    def _begin_lean(self, state: StepState, directions: Sequence[Direction]) -> bool:
        """Step the base, move to w + d and keep the result without g1, in one pass."""
        work = []
        for block, (_, scale) in zip(state.blocks, directions, strict=True):
            known = self._kernel_blocks[id(block)]
            base_state = self._state_rows(block, known.plan)
            if base_state is None:
                self._kernel_blocks.clear()  # frees the buffers, which the other path allocates itself
                return False
            rows = [known.plan.weights, known.g0_at, known.direction_at]
            work.append((block, rows, scale, base_state))
        state.moved = list(state.blocks)
        for block, rows, scale, base_state in work:
            self._begin_lean_block(block, rows, scale, base_state)
            state.base_stepped = True
            block.g0 = []
        self.stepped_base = True
        return True

    def _begin_lean_block(self, block: Block, rows: Rows, scale: Tensor, base_state: Rows) -> None:
        known = self._kernel_blocks[id(block)]
        buffer = known.buffer or known.plan.buffer()
        rows = [*rows, buffer.addresses(), *base_state]
        self._step_block("begin_lean", block, known.plan, rows, scale)
        block.saved, known.buffer = buffer, None

    def _end_lean(self, state: StepState) -> bool:
        """Compute `w = saved - lr * e * g1`, with e as in `wsam._core.lean`."""
        found = [self._rows_after_passes(block) for block in state.blocks]
        if None in found:
            return False
        for block, rows in zip(state.blocks, found, strict=True):
            self._end_lean_block(block, rows or [])
        return True

    def _end_lean_block(self, block: Block, rows: Rows) -> None:
        self._step_block("end_lean", block, self._kernel_blocks[id(block)].plan, rows)

    def _step_block(
        self,
        kernel: str,
        block: Block,
        plan: WorkPlan,
        rows: Rows,
        *more: Tensor,
        branches: int = 0,
        kept: list[int] | None = None,
    ) -> None:
        """Launch a kernel that steps a block."""
        counts, constants = [], {}
        if kernel != "end_lean":  # which does not involve the base
            branches |= branches_of(self._base, block.group)
            constants = {"BRANCHES": branches}
            if branches & ADAM:
                counts = [self._base.state[p]["step"] for p in block.params]
                rows = [*rows, data_ptrs(counts)]
        numbers = self._rows[self._row(block)]
        shape = (plan.where, plan.offset, plan.sizes, numbers, *more, len(block.params))
        table = self._tables.table([*rows, kept or []])
        self._launch(kernel, plan.programs, table, *shape, **constants, BLOCK=TILE)
        if counts:  # last, so that a kernel that fails to compile changes nothing
            torch._foreach_add_(counts, 1)
        increment_version(block.weights())


class EagerTritonBackend:
    """Uses the fused kernels in steps that are not recorded.

    Args:
        device: of all parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernels: dict[bool, TritonBackend] = {}  # True: for steps that reuse a kept vector
        self._active: TritonBackend | None = None

    def perturb(self, state: StepState) -> bool:
        """Move the weights to w + d, if nothing prevents kernels in this step."""
        kernels = self._prepare(state)
        done = kernels is not None and kernels.perturb(state)
        self._active = kernels if done else None
        return done

    def finish(self, state: StepState) -> bool:
        """Finish a step that kernels have begun, or one with a single pass and a kept vector."""
        kernels = self._active
        if state.action is Action.REUSE:
            kernels = self._prepare(state) if state.phase is Phase.PERTURBED else None
        return kernels is not None and kernels.finish(state)

    def _prepare(self, state: StepState) -> TritonBackend | None:
        """Return the backend for this step, with its numbers uploaded; None if there is none."""
        if state.manual or torch.compiler.is_compiling():
            return None
        base, rule, boost = state.base, state.rule, state.boost
        if not may_use_kernels(base, rule) or self._device.index != torch.cuda.current_device():
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        reuses = state.action is Action.REUSE
        kernels = self._kernels.get(reuses)
        if kernels is None or not kernels.fits(base, rule, boost):
            kernels = TritonBackend(self._device, base, rule, boost, reuses)
            self._kernels[reuses] = kernels
        kernels.begin(recording=False)
        kernels.write_numbers()
        return kernels


class Launcher:
    """Launches kernels on one device with little host time.

    Triton inspects all arguments before each launch to select a variant of a kernel. Here the
    compile-time constants determine it: all tensors are aligned to 16 bytes, and kernels do not
    specialize on other arguments.

    Args:
        device: where to launch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._direct = True

    def __call__(self, name: str, programs: int, *given: Any, **constants: Any) -> None:
        """Launch a kernel, with its constants in the order of its signature."""
        key = (name, *constants.values())
        compiled = self._compiled.get(key)
        if compiled is not None:
            try:
                compiled[programs, 1, 1](*given, *constants.values(), stream=self._stream())
                return
            except TypeError:  # older versions of Triton take neither constants nor a stream here
                self._compiled, self._direct = {}, False
        from wsam.accel import triton_kernels

        run = getattr(triton_kernels, name)[(programs,)]
        compiled = run(*given, **constants, num_warps=WARPS)
        if compiled is not None and self._direct:
            self._compiled[key] = compiled

    def _stream(self) -> int | None:
        found: Any = torch.cuda.current_stream(self._device) if self._device is not None else None
        return None if found is None else found.cuda_stream


@functools.cache
def triton_is_installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def kernels_work_on(device: torch.device) -> bool:
    """Whether Triton can compile and run a kernel on the device."""
    if not triton_is_installed():
        return False
    rows, partial = torch.ones(7, 4, device=device), torch.zeros(2, device=device)
    numbers = torch.full((COLUMNS,), -0.5, dtype=torch.float64, device=device)
    plan = WorkPlan([rows[0]], device)
    table = torch.tensor(data_ptrs(rows.unbind()), device=device)
    shape, launch = (plan.where, plan.offset, plan.sizes), Launcher(device)
    try:
        for first in range(2):  # compiled, then launched directly
            launch("squares", 1, table, *shape, partial, first, 1, BLOCK=TILE)
        branches = HAS_G0 | DECAY | ADAM | DECOUPLED_DECAY | PRECONDITION
        launch("finish", 1, table, *shape, numbers, 1, BRANCHES=branches, BLOCK=TILE)
    except Exception as error:  # training continues without kernels
        warn(f"Triton is installed but cannot compile kernels, so steps do not use them: {error}")
        return False
    return partial.tolist() == [4.0, 4.0]
