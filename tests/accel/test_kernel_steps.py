"""What may happen to weights, gradients and memory while steps go by kernels."""

import warnings
import weakref
from array import array
from collections.abc import Callable
from types import MethodType
from typing import Any

import emulated
import pytest
import torch
from torch import Tensor, nn

import wsam
from wsam import kernels, tables
from wsam.bases import may_use_kernels
from wsam.block import Piece
from wsam.plan import Plan

CPU = torch.device("cpu")


class Watched:
    """A model whose optimizer steps by emulated kernels, and what was alive in its second pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "wsam", **options: object):
        self.device = emulated.install(monkeypatch)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        base = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.opt = wsam.create(name, base, model=self.model, **options)
        self.kernels = emulated.attach(self.opt)
        self.pieces: list[weakref.ref[Piece]] = []
        self.alive: list[int] = []
        own = Plan.piece

        def piece(plan: Plan) -> Piece:
            made = own(plan)
            self.pieces.append(weakref.ref(made))
            return made

        monkeypatch.setattr(Plan, "piece", piece)

    def count(self) -> int:
        return sum(ref() is not None for ref in self.pieces)

    def closure(self) -> torch.Tensor:
        self.alive.append(self.count())
        loss = self.model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss


def test_copies_live_as_long_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for _ in range(3):
        watched.opt.step(watched.closure)
        assert watched.count() == 0
    assert watched.alive == [0, 1] * 3


def test_a_lean_step_that_kernels_decline_holds_none_of_their_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, lean=True)
    for _ in range(3):
        watched.opt.step(watched.closure)
        assert watched.count() == 0
    assert watched.alive == [0, 0, 0, 1, 0, 1], "in the first step there is no momentum yet"


def test_a_gradient_that_is_not_kept_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, refs = Watched(monkeypatch, "sam"), []

    def closure() -> torch.Tensor:
        assert not any(ref() is not None for ref in refs), "its memory is the second pass's"
        loss = watched.closure()
        refs[:] = [weakref.ref(p.grad) for p in watched.model.parameters()]
        return loss

    for _ in range(3):
        watched.opt.step(closure)
        watched.opt.zero_grad()


def test_four_launches_and_two_tables_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, written = Watched(monkeypatch), []
    own = tables.upload

    def upload(into: torch.Tensor, numbers: "array[int] | array[float]") -> None:
        written.append(into.dtype)
        own(into, numbers)

    for module in (tables, kernels):
        monkeypatch.setattr(module, "upload", upload)
    for _ in range(3):
        watched.opt.step(watched.closure)
    launched = {
        name: kernel.launches for name, kernel in vars(watched.device).items() if kernel.launches
    }
    assert launched == {"squares": 3, "scales": 3, "save_and_add": 3, "finish": 2}
    assert written.count(torch.float64) == 1, "nothing was scheduled"
    assert written.count(torch.int64) <= 3 + 2, "at most one before the second pass, one after it"


def test_a_memory_error_in_the_middle_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)

    def fail(*given: object, **flags: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(watched.device.squares, "run", fail)
        with pytest.raises(torch.OutOfMemoryError):
            watched.opt.step(watched.closure)
    assert watched.count() == 0
    watched.opt.step(watched.closure)


def trained(fused: bool, between: Callable[[nn.Module], None], **options: Any) -> list[Tensor]:
    """Return the weights after some steps, `between` called at the begin of every pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = wsam.WSAM(base, model=model, rho=0.5, **options)
    if fused:
        emulated.attach(opt)
    for step in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

        def closure(x: Tensor = x) -> Tensor:
            between(model)
            loss = model(x).square().mean()
            loss.backward()
            return loss

        opt.step(closure)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("lean", [False, True])
def test_weights_that_a_pass_moves(lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `flatten_parameters` of a recurrent layer does, and whoever loads weights back."""
    emulated.install(monkeypatch)
    kept: list[Tensor] = []

    def move(model: nn.Module) -> None:
        for p in model.parameters():
            kept.append(p.data)
            p.data = p.data.clone()

    for mine, its in zip(*(trained(f, move, lean=lean) for f in (False, True)), strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("recording", [False, True])
def test_a_step_finds_weights_where_they_are(
    recording: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    (block,) = watched.opt._layout()
    gradients = [torch.ones_like(p) for p in block.params]
    for again in (False, True):
        watched.kernels.begin(recording=again and recording)
        assert watched.kernels.scales([block], [gradients]) is not None
        found = watched.kernels._begun[id(block)].plan.weights
        assert found == [p.data_ptr() for p in block.params]
        kept = [p.data for p in block.params]
        for p, old in zip(block.params, kept, strict=True):
            p.data = old.clone()
    block.params[0].data = block.params[0].data.t().contiguous().t()
    watched.kernels.begin(recording=recording)
    gradients[0] = gradients[0].t().contiguous().t()
    made = watched.kernels.scales([block], [gradients])
    assert (made is None) is recording, "while a step is recorded no plan can be made"


@pytest.mark.parametrize("groups", [1, 9, 30])
def test_plans_are_made_once(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made, own = [], Plan.__init__

    def init(self: Plan, *given: Any) -> None:
        made.append(1)
        own(self, *given)

    emulated.install(monkeypatch)
    monkeypatch.setattr(Plan, "__init__", init)
    params = [nn.Parameter(torch.randn(3)) for _ in range(groups)]
    opt = wsam.WSAM(torch.optim.SGD([{"params": [p]} for p in params], lr=0.1))
    emulated.attach(opt)

    def closure() -> Tensor:
        loss = torch.stack(params).square().sum()
        loss.backward()
        return loss

    for _ in range(4):
        opt.step(closure)
    assert len(made) == groups


def test_numbers_that_were_interrupted_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    group, own = watched.opt.param_groups[0], tables.upload
    watched.kernels.write_numbers()

    def interrupted(into: Tensor, numbers: "array[float]") -> None:
        own(into, numbers)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(kernels, "upload", interrupted)
        group["lr"] = 0.5
        with pytest.raises(KeyboardInterrupt):
            watched.kernels.write_numbers()
    group["lr"] = 0.1
    watched.kernels.write_numbers()
    assert float(watched.kernels._numbers[0, 5]) == 0.1


def test_a_weight_that_grows_into_its_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = torch.zeros(256)
    params = [nn.Parameter(flat[:64]), nn.Parameter(flat[64:128])]
    opt = wsam.WSAM(torch.optim.SGD(params, lr=0.1))
    fused = kernels.Kernels(CPU, opt.base, opt.rule, 1.0)

    def fit() -> bool:
        fused.begin(recording=False)
        blocks = opt._layout()
        return (
            fused.scales(blocks, [[torch.ones_like(p) for p in b.params] for b in blocks])
            is not None
        )

    emulated.install(monkeypatch)
    assert fit()
    params[0].data = flat[:128]
    assert not fit()
    assert not fit(), "nor by a new plan, in which the two share memory"


@pytest.mark.parametrize("name", ["sam", "wsam"])
@pytest.mark.parametrize("geometry", [wsam.Adaptive(), wsam.Fisher()])
def test_the_copy_waits_for_what_the_direction_is_made_of(
    name: str, geometry: wsam.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the peak would be one parameter-sized buffer higher."""
    watched = Watched(monkeypatch, name, geometry=geometry)
    roots: list[weakref.ref[Tensor]] = []
    own_root, own_piece = type(geometry).root, Plan.piece

    def root(self: Any, *given: Any) -> Any:
        made = own_root(self, *given)
        roots.extend(weakref.ref(t) for t in made)
        return made

    def piece(plan: Plan) -> Piece:
        assert roots
        assert not any(ref() is not None for ref in roots)
        return own_piece(plan)

    monkeypatch.setattr(type(geometry), "root", root)
    monkeypatch.setattr(Plan, "piece", piece)
    for _ in range(2):
        watched.opt.step(watched.closure)


def test_a_group_is_as_it_was_or_as_it_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and history alike, where the second group's kernel fails."""
    device = emulated.install(monkeypatch)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": layer.parameters()} for layer in model]
    opt = wsam.WSAM(torch.optim.Adam(groups, lr=0.01, foreach=False), model=model)
    emulated.attach(opt)

    def closure() -> Tensor:
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure)
    before = [p.detach().clone() for p in model.parameters()]
    launched, own = device.finish.launches, device.finish.run

    def failing(*given: Any, **flags: Any) -> None:
        if device.finish.launches == launched + 2:
            raise torch.OutOfMemoryError
        own(*given, **flags)

    device.finish.run = failing
    with pytest.raises(torch.OutOfMemoryError):
        opt.step(closure)
    same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert same == [False, False, True, True]
    assert [int(opt.state[p]["step"]) for p in model.parameters()] == [3, 3, 2, 2]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lean", [False, True])
def test_ctrl_c_after_the_update_is_made(lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step counts, and the next one has nothing to say of it."""
    watched = Watched(monkeypatch, lean=lean)
    for _ in range(2):
        watched.opt.step(watched.closure)

    def strike(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(watched.opt, "_refuse_changed_gradients", strike)
        with pytest.raises(KeyboardInterrupt):
            watched.opt.step(watched.closure)
    watched.opt.step(watched.closure)
    assert watched.opt.param_groups[0]["sam_step"] == 4
    assert watched.opt.skipped == 0


def test_a_lean_step_that_kernels_decline_makes_its_direction_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, lean=True, geometry=wsam.Adaptive())
    watched.opt.base.register_step_pre_hook(lambda *_: None)
    fused = emulated.attach(watched.opt)
    assert not fused.knows_base
    for _ in range(2):
        watched.opt.step(watched.closure)
    assert watched.device.squares.launches == 0


@pytest.mark.parametrize("lean", [False, True])
def test_a_scheduler_over_the_base_is_told_of_the_step(
    lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch, lean=lean)
    base = watched.opt.base
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1)  # now `base.step` is its own
    assert may_use_kernels(base, watched.opt.rule)
    watched.opt.step(watched.closure)  # there is no momentum yet: the base itself
    base._opt_called = False  # type: ignore[attr-defined]
    fused = emulated.attach(watched.opt)
    watched.opt.step(watched.closure)
    assert fused.stepped_base
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert base.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_was_replaced_is_the_one_that_is_made(
    scheduled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, called = Watched(monkeypatch), []
    base, own = watched.opt.base, torch.optim.SGD.step

    def step(self: torch.optim.SGD) -> None:
        called.append(own(self))

    base.step = MethodType(step, base)  # type: ignore[method-assign]
    if scheduled:
        torch.optim.lr_scheduler.StepLR(base, 1)
    assert not may_use_kernels(base, watched.opt.rule)
    fused = emulated.attach(watched.opt)  # as in a recording
    for _ in range(3):
        watched.opt.step(watched.closure)
    assert len(called) == 3
    assert not fused.stepped_base


@pytest.mark.parametrize(
    ("name", "options"), [("wsam", {}), ("wsam", {"lean": True}), ("coupled_wsam", {})]
)
def test_what_is_the_base_alone_is_left_to_it(
    name: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At gamma = 0, where the step must be the base's own bit for bit."""
    watched = Watched(monkeypatch, name, gamma=0.0, **options)
    for _ in range(3):
        watched.opt.step(watched.closure)
    ends = [getattr(watched.device, end) for end in ("finish", "begin_lean", "end_lean")]
    assert [end.launches for end in ends] == [0, 0, 0]
    watched.opt.param_groups[0]["sam_gamma"] = 0.5
    watched.opt.step(watched.closure)
    assert sum(end.launches for end in ends) == (2 if options else 1)


def test_one_norm_over_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.install(monkeypatch)
    params = [nn.Parameter(torch.zeros(3000)), nn.Parameter(torch.zeros(50))]
    groups = [{"params": [params[0]], "sam_rho": 0.3}, {"params": [params[1]], "sam_rho": 0.7}]
    opt = wsam.WSAM(torch.optim.SGD(groups, lr=0.1))
    fused = kernels.Kernels(CPU, opt.base, opt.rule, 1.0)
    fused.begin(recording=False)
    fused.write_numbers()
    gradients = [[torch.full((3000,), 2.0)], [torch.full((50,), -3.0)]]
    found = fused.scales(opt._layout(), gradients)
    norm = (3000 * 4.0 + 50 * 9.0) ** 0.5
    assert found is not None
    assert [float(scale) for scale in found] == pytest.approx([0.3 / norm, 0.7 / norm])
