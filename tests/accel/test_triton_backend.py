"""Memory, launches and interruptions of steps that use kernels, which are emulated on the CPU."""

import warnings
import weakref
from array import array
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import emulated_kernels
import pytest
import torch
from torch import Tensor, nn

import wsam
from wsam._core.param_blocks import Block
from wsam._core.step_state import Action, Phase, StepState
from wsam.accel import cuda_graph, tensor_table, triton_backend
from wsam.accel.base_optimizers import may_use_kernels
from wsam.accel.tensor_table import WeightBuffer, WorkPlan
from wsam.accel.triton_backend import PLANS, WARPS, Launcher, TritonBackend
from wsam.rule import Reuse
from wsam.schedule import Every

CPU = torch.device("cpu")


class Loop:
    """A model whose optimizer uses emulated kernels. Counts buffers that are alive in each pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str = "wsam", **options: object):
        self.kernels = emulated_kernels.install(monkeypatch)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        base = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.opt = wsam.create(method, base, model=self.model, **options)
        emulated_kernels.attach(self.opt)
        self._buffers: list[weakref.ref[WeightBuffer]] = []
        self.alive: list[int] = []
        own = WorkPlan.buffer

        def buffer(plan: WorkPlan) -> WeightBuffer:
            made = own(plan)
            self._buffers.append(weakref.ref(made))
            return made

        monkeypatch.setattr(WorkPlan, "buffer", buffer)

    def buffers_alive(self) -> int:
        return sum(ref() is not None for ref in self._buffers)

    def closure(self) -> Tensor:
        self.alive.append(self.buffers_alive())
        loss = self.model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.opt.step(self.closure)


def state_of(opt: wsam.SharpnessAware, gradients: list[list[Tensor]] | None = None) -> StepState:
    """Return a step after its first pass."""
    state = opt._new_step()
    state.blocks = [block.part(range(len(block.params))) for block in opt._all_blocks()]
    for i, block in enumerate(state.blocks):
        block.g0 = gradients[i] if gradients else [torch.ones_like(p) for p in block.params]
    state.enter(Phase.PERTURBED)
    return state


@torch.no_grad()
def perturb(backend: TritonBackend, opt: wsam.SharpnessAware, recording: bool = False) -> bool:
    """Perturb and restore."""
    backend.begin(recording)
    state = state_of(opt)
    done = backend.perturb(state)
    for block in state.blocks:
        if block.saved is not None:
            block.saved.restore(block.params)
    return done


@pytest.mark.parametrize(("reuse", "fused"), [(Reuse(), True), (Reuse(scale_by_norm=True), False)])
def test_a_recorded_step_does_not_depend_on_a_weight_of_zero(
    reuse: Reuse, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of 0 needs no norm. A later one may, and is an input of the same recording."""
    loop = Loop(monkeypatch, when=Every(2), reuse=reuse, gamma=0.0)
    loop.train(2)
    opt = loop.opt
    backend = TritonBackend(CPU, opt.base, opt.rule, 1.0, reuses=True)
    backend.begin(recording=False)
    backend.write_numbers()
    opt.param_groups[0]["sam_gamma"] = torch.zeros(())  # as while a step is recorded
    state = state_of(opt)
    state.action = Action.REUSE
    with torch.no_grad():
        assert backend.finish(state) == fused


# Memory ---------------------------------------------------------------------------------------------


def test_buffers_are_freed_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    for _ in range(3):
        loop.train(1)
        assert loop.buffers_alive() == 0
    assert loop.alive == [0, 1] * 3


def test_a_lean_step_without_kernels_holds_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch, lean=True)
    for _ in range(3):
        loop.train(1)
        assert loop.buffers_alive() == 0
    assert loop.alive == [0, 0, 0, 1, 0, 1], "the first step has no momentum yet, so no kernel"


def test_g0_is_freed_where_the_rule_does_not_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, refs = Loop(monkeypatch, "sam"), []

    def closure() -> Tensor:
        assert not any(ref() is not None for ref in refs)
        loss = loop.closure()
        refs[:] = [weakref.ref(p.grad) for p in loop.model.parameters()]
        return loss

    for _ in range(3):
        loop.opt.step(closure)
        loop.opt.zero_grad()


@pytest.mark.parametrize(
    ("method", "geometry"), [("sam", wsam.Adaptive()), ("wsam", wsam.Fisher())]
)
def test_the_buffer_is_allocated_after_the_geometry_is_freed(
    method: str, geometry: wsam.Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the peak would be one parameter-sized buffer higher."""
    loop = Loop(monkeypatch, method, geometry=geometry)
    metrics: list[weakref.ref[Tensor]] = []
    own_metric, own_buffer = type(geometry).sqrt_metric, WorkPlan.buffer

    def sqrt_metric(self: Any, *given: Any) -> Any:
        made = own_metric(self, *given)
        metrics.extend(weakref.ref(t) for t in made)
        return made

    def buffer(plan: WorkPlan) -> WeightBuffer:
        assert metrics
        assert not any(ref() is not None for ref in metrics)
        return own_buffer(plan)

    monkeypatch.setattr(type(geometry), "sqrt_metric", sqrt_metric)
    monkeypatch.setattr(WorkPlan, "buffer", buffer)
    loop.train(2)


def test_a_memory_error_frees_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)

    def fail(*given: object, **constants: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(loop.kernels.squares, "run", fail)
        with pytest.raises(torch.OutOfMemoryError):
            loop.train(1)
    assert loop.buffers_alive() == 0
    loop.train(1)


# Launches and uploads -------------------------------------------------------------------------------


def test_four_launches_and_two_tables_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, uploaded = Loop(monkeypatch), []
    own = tensor_table.upload

    def upload(into: Tensor, numbers: "array[int] | array[float]") -> None:
        uploaded.append(into.dtype)
        own(into, numbers)

    for module in (tensor_table, triton_backend):
        monkeypatch.setattr(module, "upload", upload)
    loop.train(3)
    launches = {name: k.launches for name, k in vars(loop.kernels).items() if k.launches}
    assert launches == {"squares": 3, "scales": 3, "save_and_add": 3, "finish": 2}
    assert uploaded.count(torch.float64) == 1, "no value was scheduled"
    assert uploaded.count(torch.int64) <= 3 + 2, "at most one before the second pass, one after it"


def test_one_norm_over_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_kernels.install(monkeypatch)
    params = [nn.Parameter(torch.zeros(3000)), nn.Parameter(torch.zeros(50))]
    groups = [{"params": [params[0]], "sam_rho": 0.3}, {"params": [params[1]], "sam_rho": 0.7}]
    opt = wsam.WSAM(torch.optim.SGD(groups, lr=0.1))
    gradients = [[torch.full((3000,), 2.0)], [torch.full((50,), -3.0)]]
    assert emulated_kernels.backend_of(opt).perturb(state_of(opt, gradients))
    norm = (3000 * 4.0 + 50 * 9.0) ** 0.5
    torch.testing.assert_close(params[0].detach(), gradients[0][0] * 0.3 / norm)
    torch.testing.assert_close(params[1].detach(), gradients[1][0] * 0.7 / norm)


def test_interrupted_uploads_of_numbers_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    backend = emulated_kernels.backend_of(loop.opt)
    group, own = loop.opt.param_groups[0], triton_backend.upload

    def interrupted(into: Tensor, numbers: "array[float]") -> None:
        own(into, numbers)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(triton_backend, "upload", interrupted)
        group["lr"] = 0.5
        with pytest.raises(KeyboardInterrupt):
            backend.write_numbers()
    group["lr"] = 0.1
    backend.write_numbers()
    assert float(backend._numbers[0, 5]) == 0.1


def test_an_empty_parameter_does_not_disable_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = emulated_kernels.install(monkeypatch)
    params = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.empty(0))]
    opt = wsam.WSAM(torch.optim.SGD(params, lr=0.1, momentum=0.9))
    emulated_kernels.attach(opt)

    def closure() -> Tensor:
        loss = params[0].square().sum() + params[1].square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure)
    assert kernels.finish.launches == 2, "all but the first step, which creates the momentum"


# Which steps use kernels ----------------------------------------------------------------------------


def test_a_lean_step_computes_its_direction_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the base has no kernel, the backend returns before it computes anything."""
    loop = Loop(monkeypatch, lean=True, geometry=wsam.Adaptive())
    loop.opt.base.register_step_pre_hook(lambda *_: None)
    loop.train(2)
    assert loop.kernels.squares.launches == 0


@pytest.mark.parametrize("lean", [False, True])
def test_a_scheduler_of_the_base_notices_the_step(
    lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(monkeypatch, lean=lean)
    base = loop.opt.base
    scheduler = torch.optim.lr_scheduler.StepLR(base, 1)  # replaces `base.step` by a wrapper
    assert may_use_kernels(base, loop.opt.rule)
    loop.train(1)  # by the base, which has no momentum yet
    base._opt_called = False  # type: ignore[attr-defined]
    loop.train(1)
    ends = loop.kernels.end_lean if lean else loop.kernels.finish
    assert ends.launches == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert base.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_replaced_base_step_is_called(scheduled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a recording's backend too, which does not call `may_use_kernels`."""
    loop, calls = Loop(monkeypatch), []
    base, own = loop.opt.base, torch.optim.SGD.step

    def step(self: torch.optim.SGD) -> None:
        calls.append(own(self))

    base.step = MethodType(step, base)  # type: ignore[method-assign]
    if scheduled:
        torch.optim.lr_scheduler.StepLR(base, 1)
    assert not may_use_kernels(base, loop.opt.rule)
    backend = emulated_kernels.backend_of(loop.opt)
    for _ in range(3):
        with cuda_graph.use_backend(loop.opt, backend):
            loop.train(1)
    assert len(calls) == 3
    assert loop.kernels.save_and_add.launches == 3
    assert not backend.stepped_base


@pytest.mark.parametrize(
    ("method", "options"), [("wsam", {}), ("wsam", {"lean": True}), ("coupled_wsam", {})]
)
def test_a_step_that_equals_the_bases_is_left_to_it(
    method: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gamma = 0 the step must be the base's own, bit for bit."""
    loop = Loop(monkeypatch, method, gamma=0.0, **options)
    loop.train(3)
    ends = [getattr(loop.kernels, end) for end in ("finish", "begin_lean", "end_lean")]
    assert [end.launches for end in ends] == [0, 0, 0]
    loop.opt.param_groups[0]["sam_gamma"] = 0.5
    loop.train(1)
    assert sum(end.launches for end in ends) == (2 if options else 1)


def test_manual_steps_use_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(monkeypatch)
    loop.train(2)
    launches = loop.kernels.squares.launches
    loop.opt.begin()
    loop.closure()
    loop.opt.ascend()
    loop.closure()
    loop.opt.descend()
    assert all(p.grad is not None for p in loop.model.parameters())
    loop.opt.step()
    assert loop.kernels.squares.launches == launches


def test_sharded_parameters_use_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their norm is summed over ranks, which no kernel does."""
    loop = Loop(monkeypatch)
    backend = emulated_kernels.backend_of(loop.opt)
    state = state_of(loop.opt)
    state.blocks[0].sharded = True
    assert not backend.perturb(state)
    assert not backend.finish(state)
    assert loop.kernels.squares.launches == 0


@pytest.mark.parametrize(("starts", "fits"), [((0, 64), True), ((0, 32), False), ((0, 0), False)])
def test_weights_that_share_memory_use_no_kernels(
    starts: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated_kernels.install(monkeypatch)
    flat = torch.zeros(128)
    params = [nn.Parameter(flat[start : start + 64]) for start in starts]
    opt = wsam.WSAM(torch.optim.SGD(params, lr=0.1))
    assert perturb(emulated_kernels.backend_of(opt), opt) is fits


def test_weights_that_begin_to_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_kernels.install(monkeypatch)
    flat = torch.zeros(256)
    params = [nn.Parameter(flat[:64]), nn.Parameter(flat[64:128])]
    opt = wsam.WSAM(torch.optim.SGD(params, lr=0.1))
    backend = emulated_kernels.backend_of(opt)
    assert perturb(backend, opt)
    params[0].data = flat[:128]
    assert not perturb(backend, opt)
    assert not perturb(backend, opt), "nor with a new plan"


def test_a_backend_fits_until_the_base_changes() -> None:
    rule = wsam.rule.Weighted()
    base = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    backend = TritonBackend(CPU, base, rule, 1.0)
    assert backend.fits(base, rule, 1.0)
    assert not backend.fits(base, rule, 2.0)
    assert not backend.fits(base, wsam.rule.Perturbed(), 1.0)
    base.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert not backend.fits(base, rule, 1.0)
    backend = TritonBackend(CPU, base, rule, 1.0)
    base.register_step_pre_hook(lambda *_: None)
    assert not backend.fits(base, rule, 1.0)


# Plans ----------------------------------------------------------------------------------------------


def linear() -> tuple[nn.Linear, TritonBackend, Block]:
    model = nn.Linear(2, 3)
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    (block,) = opt._all_blocks()
    return model, TritonBackend(CPU, opt.base, opt.rule, 1.0), block


def test_a_plan_is_replaced_if_the_layout_changes() -> None:
    model, backend, block = linear()
    before = backend._find_plan(block)
    assert before is not None
    assert backend._find_plan(block) is before
    model.weight.data = model.weight.data.clone()
    assert backend._find_plan(block) is before, "another address, the same layout"
    assert before.weights == [p.data_ptr() for p in model.parameters()]
    model.weight.data = model.weight.data.t().contiguous().t()
    transposed = backend._find_plan(block)
    assert transposed is not before
    model.weight.data = model.weight.data[:, :1]
    assert backend._find_plan(block) is not transposed


def test_the_number_of_plans_is_limited() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(30)))
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    backend = TritonBackend(CPU, opt.base, opt.rule, 1.0)
    (block,) = opt._all_blocks()
    for number in range(30):
        backend._find_plan(block.part([number]))
    assert len(backend._plans) <= PLANS


@pytest.mark.parametrize("groups", [1, 9, 30])
def test_plans_are_created_once(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    created, own = [], WorkPlan.__init__

    def init(self: WorkPlan, *given: Any) -> None:
        created.append(1)
        own(self, *given)

    emulated_kernels.install(monkeypatch)
    monkeypatch.setattr(WorkPlan, "__init__", init)
    params = [nn.Parameter(torch.randn(3)) for _ in range(groups)]
    opt = wsam.WSAM(torch.optim.SGD([{"params": [p]} for p in params], lr=0.1))
    emulated_kernels.attach(opt)

    def closure() -> Tensor:
        loss = torch.stack(params).square().sum()
        loss.backward()
        return loss

    for _ in range(4):
        opt.step(closure)
    assert len(created) == groups


@pytest.mark.parametrize("recording", [False, True])
def test_weights_that_move_between_steps(recording: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording cannot create plans, so it does not use kernels for a new layout."""
    loop = Loop(monkeypatch)
    for kernel in vars(loop.kernels).values():
        kernel.run = lambda *given, **constants: None  # a recorded kernel does not run
    backend, params = emulated_kernels.backend_of(loop.opt), list(loop.model.parameters())
    for again in (False, True):
        assert perturb(backend, loop.opt, recording=again and recording)
        (plan,) = backend._plans.values()
        assert plan.weights == [p.data_ptr() for p in params]
        for p in params:
            p.data = p.data.clone()
    params[0].data = params[0].data.t().contiguous().t()
    assert perturb(backend, loop.opt, recording) is not recording


def trained(use_kernels: bool, before_pass: Callable[[nn.Module], None], lean: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = wsam.WSAM(base, model=model, rho=0.5, lean=lean)
    opt._backend = None
    if use_kernels:
        emulated_kernels.attach(opt)
    for step in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

        def closure(x: Tensor = x) -> Tensor:
            before_pass(model)
            loss = model(x).square().mean()
            loss.backward()
            return loss

        opt.step(closure)
    return list(model.parameters())


@pytest.mark.parametrize("lean", [False, True])
def test_weights_that_move_within_a_step(lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `flatten_parameters` of a recurrent layer moves them."""
    emulated_kernels.install(monkeypatch)
    kept: list[Tensor] = []

    def move(model: nn.Module) -> None:
        for p in model.parameters():
            kept.append(p.data)
            p.data = p.data.clone()

    torch.testing.assert_close(trained(True, move, lean), trained(False, move, lean))


# Interruptions --------------------------------------------------------------------------------------


def test_a_group_is_updated_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second group's kernel fails, the first group is complete and the second is unchanged."""
    kernels = emulated_kernels.install(monkeypatch)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": layer.parameters()} for layer in model]
    opt = wsam.SAM(torch.optim.Adam(groups, lr=0.01, fused=True), model=model)
    emulated_kernels.attach(opt)

    def closure() -> Tensor:
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure)
    before = [p.detach().clone() for p in model.parameters()]
    launched, own = kernels.finish.launches, kernels.finish.run

    def failing(*given: Any, **constants: Any) -> None:
        if kernels.finish.launches == launched + 2:
            raise torch.OutOfMemoryError
        own(*given, **constants)

    kernels.finish.run = failing
    with pytest.raises(torch.OutOfMemoryError):
        opt.step(closure)
    same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert same == [False, False, True, True]
    assert [int(opt.state[p]["step"]) for p in model.parameters()] == [3, 3, 2, 2]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lean", [False, True])
def test_ctrl_c_after_the_update(lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step counts, and the next one does not warn."""
    loop = Loop(monkeypatch, lean=lean)
    loop.train(2)

    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(StepState, "require_unchanged_gradients", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loop.train(1)
    loop.train(1)
    assert loop.opt.param_groups[0]["sam_step"] == 4
    assert loop.opt.skipped == 0


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("group", [0, 1])
def test_ctrl_c_before_a_kernel(group: int, lean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups that have moved return to w; in a lean step to the base's result, with a note."""
    kernels = emulated_kernels.install(monkeypatch)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [{"params": layer.parameters()} for layer in model]
    opt = wsam.WSAM(torch.optim.SGD(groups, lr=0.1), model=model, rho=0.5, lean=lean)
    emulated_kernels.attach(opt)
    kernel = kernels.begin_lean if lean else kernels.save_and_add
    own, before = kernel.run, [p.detach().clone() for p in model.parameters()]

    def interrupted(*given: Any, **constants: Any) -> None:
        if kernel.launches > group:
            raise KeyboardInterrupt
        own(*given, **constants)

    def closure() -> Tensor:
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    kernel.run = interrupted
    with pytest.raises(KeyboardInterrupt) as caught:
        opt.step(closure)
    stepped = lean and group > 0
    assert bool(getattr(caught.value, "__notes__", [])) == stepped
    same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert same == [not stepped, not stepped, True, True]
    kernel.run = own
    opt.step(closure)


# Launcher -------------------------------------------------------------------------------------------


class Compiled:
    """A kernel as Triton returns it after compilation. It is launched without keywords."""

    def __init__(self, arguments: int) -> None:
        self.arguments, self.launched, self.attempts = arguments, [], 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*given: Any, stream: Any) -> None:
            self.attempts, self.stream = self.attempts + 1, stream
            if len(given) != self.arguments:
                raise TypeError(f"function takes exactly {self.arguments} arguments")
            self.launched.append((grid, given))

        return run


@pytest.mark.parametrize("arguments", [5, 3])
def test_a_compiled_kernel_is_launched_directly(
    arguments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless Triton is too old to take the constants, as in the second case."""
    compiled, kernels = Compiled(arguments), emulated_kernels.install(monkeypatch)
    calls = []

    def through_triton(*given: Any, **constants: Any) -> Compiled:
        calls.append((given, constants))
        return compiled

    monkeypatch.setattr(kernels, "finish", {(7,): through_triton})
    launch = Launcher(CPU)
    for _ in range(3):
        launch("finish", 7, "table", "numbers", 62, BRANCHES=3, BLOCK=16)
    constants = {"BRANCHES": 3, "BLOCK": 16, "num_warps": WARPS}
    wanted = [(("table", "numbers", 62), constants)]
    if arguments == 5:
        assert calls == wanted
        assert compiled.launched == [((7, 1, 1), ("table", "numbers", 62, 3, 16))] * 2
    else:
        assert calls == wanted * 3
        assert (compiled.attempts, compiled.launched) == (1, [])


def test_kernels_are_launched_on_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, kernels = Compiled(0), emulated_kernels.install(monkeypatch)
    monkeypatch.setattr(kernels, "finish", {(7,): lambda **constants: compiled})
    streams = {torch.device("cuda", 1): SimpleNamespace(cuda_stream=42)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    launch = Launcher(torch.device("cuda", 1))
    for _ in range(2):
        launch("finish", 7)
    assert compiled.stream == 42


def test_other_constants_need_another_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, calls = emulated_kernels.install(monkeypatch), []
    monkeypatch.setattr(
        kernels, "squares", {(1,): lambda **constants: calls.append(constants) or Compiled(1)}
    )
    launch = Launcher(CPU)
    for block in (16, 32, 16):
        launch("squares", 1, BLOCK=block)
    assert [constants["BLOCK"] for constants in calls] == [16, 32]
