"""The parts of a step, in the order they happen; `SharpnessAware` strings them together.

A step is in flight from the end of its first pass until its update. Whatever happens in between, an
exception or Ctrl-C included, `_abandon` puts weights, statistics and generators back.
"""

import contextlib
from typing import Any, ClassVar

import torch
from torch import Tensor

from wsam import lean as lean_plan
from wsam import state as saving
from wsam import update
from wsam.bases import stepping_fast
from wsam.block import Block, align_gradients, average_over_ranks, sum_over_ranks
from wsam.checks import warn
from wsam.generators import RandomStates
from wsam.kernels import Kernels, for_eager_steps
from wsam.passes import RunningStatistics
from wsam.perturb import perturb
from wsam.rule import Mix, is_number
from wsam.schedule import Scalar
from wsam.select import Selection
from wsam.update import Flight
from wsam.wrapper import Wrapper, option

STEPPED = (
    "lean=True: the base had stepped already, so the step could not be undone; "
    "the weights are at w + u + lr k g0, u the base's update"
)


class Engine(Wrapper):
    """What happens between the passes, without the public face."""

    lean: bool = option("lean")
    local: bool = option("local")
    max_norm: float | None = option("max_norm")
    nonfinite: str = option("nonfinite")
    repeat_randomness: bool = option("repeat_randomness")
    _selection: Selection

    _scratch: ClassVar[tuple[str, ...]] = (
        *Wrapper._scratch,
        *("_statistics", "_random", "_random_before", "_lean_is_safe", "_decided"),
        *("_kernels", "_own_kernels", "_sharpness", "_in_closures"),
    )

    def _prepare(self) -> None:
        super()._prepare()
        self._statistics = RunningStatistics(self.model)
        self._random = RandomStates(p.device for g in self.param_groups for p in g["params"])
        self._random_before: tuple[Any, ...] | None = None
        self._lean_is_safe = False
        # Whether the step is perturbed, where that was decided on the host before a replay.
        self._decided: bool | None = None
        self._kernels: Kernels | None = None  # a recorded step has some
        self._own_kernels: Kernels | None = None  # and an eager one on CUDA
        self._sharpness: Tensor | None = None
        self._in_closures = False

    def _look_at_model(self) -> None:
        self._statistics.look_at(self.model)

    def _count(self) -> int:
        return int(self.param_groups[0][saving.STEP])

    def _clear_gradients(self) -> None:
        """`zero_grad`, without its bookkeeping for the profiler."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def _mask(self) -> list[bool] | None:
        return self.geometry.mask(self._count(), sum(len(g["params"]) for g in self.param_groups))

    def _refresh(self) -> None:
        """Bring scheduled values up to this step, and refuse values that are not allowed."""
        self._adopt_groups()
        for group, named in zip(self.param_groups, self._schedules, strict=True):
            for name, schedule in named.items():
                value = schedule.value(group[saving.STEP], group["lr"])
                group[saving.PREFIX + name] = value
            for name in self._hyper:
                own = saving.PREFIX + name
                if own not in group:
                    raise RuntimeError("the base has been wrapped again since: use its new wrapper")
                if name in group and name not in self.defaults:
                    raise ValueError(
                        f"a parameter group was given {name!r} after construction, where it is "
                        f"not read: set group[{own!r}] and remove {name!r}"
                    )
                group[own] = saving.check_present(name, group[own], self.rule)

    def _values(self, group: dict[str, Any]) -> dict[str, Scalar]:
        return {name: group[saving.PREFIX + name] for name in self._hyper}

    def _mix(self, group: dict[str, Any]) -> Mix:
        return self.rule.mix(self._values(group), None)

    def _is_base_alone(self, group: dict[str, Any]) -> bool:
        values = self._values(group)
        if any(isinstance(value, Tensor) for value in values.values()):
            return False  # to look would be to wait for the device
        return not self.rule.needs_products(values) and self._mix(group).is_base_alone

    def _is_base_alone_somewhere(self) -> bool:
        return any(map(self._is_base_alone, self.param_groups))

    def _radius_is_zero(self) -> bool:
        return all(is_number(group[saving.PREFIX + "rho"], 0.0) for group in self.param_groups)

    def _is_chosen(self, flight: Flight) -> bool:
        if self._decided is not None:
            return self._decided
        if self._radius_is_zero():
            return False
        if self.when is None:
            return True
        flight.memory = self.when.remember()
        return self.when.chosen(
            self._count(), lambda: float(self._squares(flight.blocks, self.local).sqrt())
        )

    def _squares(self, blocks: list[Block], differ: bool) -> Tensor:
        """Return the squared norm; where it may differ between ranks their mean, so that all agree."""
        squares = update.squares_of_first(blocks)
        if differ:
            ddp: Any = self.model
            squares = squares.to(self._layout()[0].device) / ddp.process_group.size()
            sum_over_ranks(squares, ddp.process_group)
        return squares

    def _overflowed(self, blocks: list[Block], differ: bool = False) -> bool:
        """Whether to skip for a gradient that is not finite; asks the device only if it must."""
        if self.nonfinite == "propagate" or bool(torch.isfinite(self._squares(blocks, differ))):
            return False
        if self.nonfinite == "raise":
            raise FloatingPointError("a gradient is NaN or infinite; no weight was changed")
        return True

    def _take_off(self, grad_scale: Scalar | None = None, by_hand: bool = False) -> bool:
        """Begin the flight: take g0 and move to w + d; return whether the weights have moved.

        A loop by hand may run its second pass although they have not, so statistics and generators
        are held for it all the same.
        """
        self._refuse_in_flight("ascend")
        self._refuse_wrapper()
        self._drop_unfinished()
        if grad_scale is not None and self.lean:
            raise ValueError("lean=True cannot undo the step that a GradScaler may want to skip")
        self._refuse_uneven_ranks()
        self._refresh()
        flight = Flight(update.gather(self._layout(anew=True)), by_hand=by_hand)
        if not flight.blocks:
            raise RuntimeError("no parameter has a gradient: call backward() in the first pass")
        if self._decided is None:  # else a recording has decided this, too
            self._kernels = None if by_hand else self._kernels_of_base()
        if self._kernels is None or not self.rule.keeps_first:
            update.separate(flight)
        flight.scale_known = grad_scale is not None
        if grad_scale is not None:
            update.unscale(flight.blocks, grad_scale)
        if grad_scale is None or self.nonfinite != "skip":  # the scaler skips, and must hear of it
            flight.skip = self._overflowed(flight.blocks, differ=self.local)
        flight.plain = not flight.skip and not self._is_chosen(flight)
        self._flight = flight
        try:
            moved = self._move(flight)
            if moved or by_hand:
                self._hold_still(flight)
            return moved
        except BaseException as error:
            self._abandon(error)
            raise

    def _kernels_of_base(self) -> Kernels | None:
        device, *others = {block.device for block in self._layout()}
        if others:
            return None
        boost, known = self.geometry.boost, self._own_kernels
        found = for_eager_steps(self.base, self.rule, boost, device, known)
        self._own_kernels = found or known
        return found

    def _move(self, flight: Flight) -> bool:
        if flight.skip or flight.plain:
            update.detach_gradients(flight.blocks, outlive=flight.plain)
            return False
        mask = self._mask()
        if self.lean:
            flight.moved = flight.blocks
            safe = self._lean_is_safe
            fused = None if self._is_base_alone_somewhere() else self._kernels
            # A base that writes into gradients is found out here: from now on the late plan.
            with self._fast_base():
                spoils = lean_plan.begin(
                    flight, mask, self.geometry, self._mix, self.base.step, not safe, fused
                )
            self.__dict__["lean"], self._lean_is_safe = not spoils, True
            for block in flight.blocks:
                for p in block.params:
                    p.grad = None
        else:
            update.detach_gradients(flight.blocks, outlive=self.rule.keeps_first)
            spend = not self.rule.keeps_first
            perturb(flight, mask, self.geometry, spend=spend, fused=self._kernels)
            if not self.rule.keeps_first:
                for block in (*flight.blocks, *flight.moved):
                    block.first = None
        torch.clear_autocast_cache()  # or an enclosing autocast would go on using casts of w
        return True

    def _hold_still(self, flight: Flight) -> None:
        """Keep statistics, and let the second pass draw what the first drew."""
        self._statistics.hold(switch=not flight.by_hand)
        # Another optimizer in the same loop may have rewound generators; it winds them on again, too.
        if self._random_before is not None and not (flight.by_hand and self._is_rewound()):
            flight.random = self._random.read()
            self._random.write(self._random_before)

    def _is_rewound(self) -> bool:
        now, before = self._random.read(), self._random_before or ()
        return torch.equal(now[0], before[0]) and now[1:] == before[1:]

    def _return_to_weights(self) -> None:
        flight = self._flight
        assert flight is not None
        update.restore(flight.moved)
        flight.moved = []
        self._statistics.release()
        if flight.random is not None:
            self._random.write(flight.random)
            flight.random = None
        torch.clear_autocast_cache()

    def _combine(self) -> None:
        """Make of g0 and g1 what the base is fed and what is applied beside it."""
        flight = self._flight
        assert flight is not None
        if self._finish_by_kernel(flight):
            return
        self._return_to_weights()
        update.separate(flight)
        align_gradients(self._layout())
        flight.refuse_one_pass()
        if not flight.skip and not flight.plain and self.nonfinite != "propagate":
            flight.skip = self._overflowed(update.gather(self._layout()))
        if flight.keeps_second:
            flight.blocks, flight.separate = update.gather(self._layout()), False
            update.separate(flight)
        elif self.local and not flight.skip and (flight.plain or self.rule.keeps_first):
            self._average_first(flight)
        if flight.skip:
            self.zero_grad(set_to_none=True)
        elif flight.plain:
            update.put_back(flight.blocks)
            if self.max_norm is not None:
                fed = [block.shards(block.first or []) for block in flight.blocks]
                update.clip(flight.blocks, fed, [], self.max_norm)
        elif flight.stepped:
            flight.beside = lean_plan.finish(self._layout(), flight.blocks, self._mix)
        else:
            layout, blocks = self._layout(), flight.blocks
            flight.beside = update.combine(layout, blocks, self.rule, self._values, self.max_norm)
            if flight.beside and flight.by_hand:
                flight.versions = [(g, g._version) for g in self._gradients()]
        flight.ready = True

    def _gradients(self) -> list[Tensor]:
        return [p.grad for b in self._layout() for p in b.params if p.grad is not None]

    def _refuse_changed_gradients(self, flight: Flight) -> None:
        """Refuse gradients that were clipped between `descend` and `step`: half of the update."""
        present = {id(g) for g in self._gradients()} if flight.versions else set()
        if any(g._version != version or id(g) not in present for g, version in flight.versions):
            raise RuntimeError(
                "p.grad was changed between descend() and step(), but the decoupled term beside it "
                "was not: clip with max_norm of the optimizer, which scales both alike"
            )

    def _finish_by_kernel(self, flight: Flight) -> bool:
        """Do all that is left of the step, the base's part included, by one kernel if one can."""
        blocks, layout = flight.blocks, self._layout()
        ordinary = not (flight.skip or flight.plain or self.local) and self.max_norm is None
        if self._kernels is None or not ordinary or self.nonfinite != "propagate":
            return False
        if self._is_base_alone_somewhere():
            return False
        if update.latecomers(layout, blocks):
            return False
        finish = self._kernels.end_lean if flight.stepped else self._kernels.finish
        if not finish(flight):
            return False
        flight.moved, flight.stepped, flight.ready = [], True, True
        self._return_to_weights()
        return True

    def _average_first(self, flight: Flight) -> None:
        """Make of each rank's own g0, by which it perturbed, the average that all step by."""
        group: Any = self.model.process_group  # type: ignore[union-attr]
        flight.blocks = average_over_ranks(self._layout(), flight.blocks, group)

    def _refuse_wrapper(self) -> None:
        if "base" not in self.__dict__:
            name = type(self).__name__
            raise TypeError(f"{name} is a framework's wrapper: call the phases on its .optimizer")

    def _refuse_uneven_ranks(self) -> None:
        if self.local and getattr(getattr(self.model, "_join_config", None), "enable", False):
            raise RuntimeError(
                "local=True inside join(): a rank that has run out of batches would miss the average "
                "of g0; use local=False, or give every rank as many batches"
            )

    def _finish(self) -> None:
        flight = self._flight
        if flight is not None and flight.looking:
            raise RuntimeError("step() inside perturbed(), where one only looks: leave it first")
        if flight is None:
            if not saving.all_zero(self.param_groups):
                raise RuntimeError(
                    "step() needs a closure that computes the loss, calls backward() and returns the "
                    "loss: optimizer.step(closure); or, by hand, ascend() and descend() before it"
                )
            self.base.step()
            return
        if (flight.plain or flight.skip) and not flight.ready:
            self._combine()
        if not flight.ready:
            raise RuntimeError("step() while the weights are at w + d: call descend() before it")
        self._refuse_changed_gradients(flight)
        self._land()
        self.base.__dict__["_opt_called"] = True  # for a scheduler over it, where it is not called
        if flight.skip:
            self._recall(flight)
            self.skipped += 1
            return
        if flight.plain:
            self.base.step()
        elif flight.stepped:
            update.apply(flight.beside)
        else:
            with self._fast_base():
                self.base.step()
                update.apply(flight.beside)
        self._count_up()

    def _fast_base(self) -> contextlib.AbstractContextManager[None]:
        groups = [group for group in self.param_groups if not self._is_base_alone(group)]
        return stepping_fast(self.base, groups)

    def _count_up(self) -> None:
        for group in self.param_groups:
            group[saving.STEP] += 1

    def _leave_out(self) -> None:
        """Let the step in flight be none: it is counted as skipped."""
        assert self._flight is not None
        self._flight.skip = True

    def _land(self) -> None:
        """End the flight: nothing of it is left."""
        self._flight = None
        self._random_before = None
        self._selection.reset()
        if self._kernels is not None:
            self._kernels.end()

    def _drop_unfinished(self) -> None:
        """Forget a step that was prepared and never finished: a GradScaler skipped it."""
        if self._flight is not None:
            self.skipped += not self._flight.made
            self._abandon()

    def _recall(self, flight: Flight) -> None:
        """Let the interval forget a step that is not made."""
        if self.when is not None and flight.memory is not None:
            self.when.recall(flight.memory)

    def _abandon(self, error: BaseException | None = None) -> None:
        """Undo what a step in flight has done to weights, statistics and generators."""
        flight = self._flight
        if flight is not None:
            with torch.no_grad():
                self._return_to_weights()
            if flight.made:  # there is nothing to undo, and what was interrupted is the counting
                self._count_up()
                self._land()
                return
            self._recall(flight)
            if flight.stepped and error is not None:
                error.add_note(STEPPED)
            elif flight.stepped:
                warn(STEPPED)
        self._land()
