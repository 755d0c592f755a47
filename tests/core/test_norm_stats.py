"""Running statistics and spectral norms: they advance once a step, with and without model=."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import METHODS, RULE_VARIANTS, STYLES, covering, make_method, make_step, same
from square_loss import (
    X,
    run_in_thread,
    square_closure,
    train,
    train_forward,
    with_and_without_model,
)
from torch import Tensor, nn
from torch.func import functional_call

import wsam

WITH_MODEL = [True, False]
SCRIPTED = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::torch.jit.TracerWarning")


def sam(weights: Any, model: nn.Module | None = None) -> wsam.SharpnessAware:
    return wsam.SAM(torch.optim.SGD(weights, lr=0.1), model=model, rho=0.5)


def counts(model: nn.Module) -> list[int]:
    return [int(b) for name, b in model.named_buffers() if "num_batches" in name]


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def small_normed() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


# --- every kind of layer ---------------------------------------------------------------------------

NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "2d": (lambda: nn.BatchNorm2d(4), (6, 4, 3, 3)),
    "3d": (lambda: nn.BatchNorm3d(4), (2, 4, 2, 3, 3)),
    "cumulative": (lambda: nn.BatchNorm1d(4, momentum=None), (6, 4)),
    "lazy": (nn.LazyBatchNorm1d, (6, 4)),
    "not_affine": (lambda: nn.BatchNorm1d(4, affine=False), (6, 4)),
    "instance": (lambda: nn.InstanceNorm1d(4, track_running_stats=True), (6, 4, 5)),
    "instance2d": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), (6, 4, 3, 3)),
    "untracked": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (6, 4)),
}


class Normed(nn.Module):
    """A trained scale before a normalization layer, so that its input differs at w + d."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, -0.5, 2.0, 0.3]))
        self.norm = norm
        self.after = nn.Parameter(torch.tensor([0.5, 1.0, -1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, 4) + (1,) * (x.dim() - 2)
        y = self.norm(x * self.scale.reshape(shape) + 0.1) * self.after.reshape(shape)
        return ((y - 1) ** 3 + y).flatten(1).sum(1)


def normed(kind: str) -> tuple[Normed, Callable[[int], Tensor]]:
    make, shape = NORMS[kind]
    model = Normed(make())

    def data(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(shape, generator=generator) + 1.0

    if kind == "lazy":  # an optimizer cannot be built before the first forward pass
        model(data(0))
        model.norm.reset_running_stats()
    return model, data


@covering(2, name=RULE_VARIANTS, kind=list(NORMS), style=STYLES, pass_model=WITH_MODEL)
def test_bn_one_update(name: str, kind: str, style: str, pass_model: bool) -> None:
    """Each step leaves the statistics where its first pass alone would have left them."""
    model, data = normed(kind)
    options = {"model": model} if pass_model else {}
    opt = make_method(name, torch.optim.SGD(model.parameters(), lr=0.01), rho=1.0, **options)
    for t in range(3):
        twin = copy.deepcopy(model)
        twin(data(t))
        make_step(opt, lambda t=t: opt.select(model(data(t))), style)
        assert same(statistics(model), statistics(twin))
    if kind != "untracked":
        counts = not kind.startswith("instance")  # torch's InstanceNorm counts no batches
        assert int(model.norm.num_batches_tracked) == (3 if counts else 0)
        assert not torch.equal(model.norm.running_mean, torch.zeros(4))


@covering(
    2,
    name=RULE_VARIANTS,
    kind=["1d", "cumulative", "instance"],
    fail_in=[1, 2],
    pass_model=WITH_MODEL,
)
def test_bn_one_update_after_an_error(name: str, kind: str, fail_in: int, pass_model: bool) -> None:
    """An error in either pass leaves at most the first pass in the statistics; the next step works."""
    model, data = normed(kind)
    options = {"model": model} if pass_model else {}
    opt = make_method(name, torch.optim.SGD(model.parameters(), lr=0.01), rho=1.0, **options)
    make_step(opt, lambda: opt.select(model(data(0))))
    before, once = statistics(model), copy.deepcopy(model)
    once(data(1))
    calls = 0

    def run() -> Tensor:
        nonlocal calls
        calls += 1
        opt.select(model(data(1))).backward()
        if calls == fail_in:
            raise KeyboardInterrupt
        return torch.zeros(())

    with pytest.raises(KeyboardInterrupt):
        opt.step(run)
    assert same(statistics(model), before) or same(statistics(model), statistics(once))
    twin = copy.deepcopy(model)
    twin(data(2))
    make_step(opt, lambda: opt.select(model(data(2))))
    assert same(statistics(model), statistics(twin))
    model(data(3))  # outside a step the layers update as usual
    assert not same(statistics(model), statistics(twin))


@covering(2, reason=["interval", "radius"], style=STYLES, pass_model=WITH_MODEL)
def test_bn_one_update_in_a_step_without_perturbation(
    reason: str, style: str, pass_model: bool
) -> None:
    """A loop by hand runs its second pass anyway, which must not count either."""
    model, data = normed("2d")
    options: dict[str, Any] = {
        "interval": {"when": wsam.schedule.Every(2, offset=1)},
        "radius": {"rho": 0.0},
    }[reason]
    if pass_model:
        options["model"] = model
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.01), **options)
    for t in range(2):
        twin = copy.deepcopy(model)
        twin(data(t))
        make_step(opt, lambda t=t: opt.select(model(data(t))), style)
        assert same(statistics(model), statistics(twin))
        assert int(model.norm.num_batches_tracked) == t + 1


@with_and_without_model
def test_bn_in_evaluation_mode(pass_model: bool) -> None:
    model, data = normed("2d")
    model.eval()
    options = {"model": model} if pass_model else {}
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.01), **options)
    before = statistics(model)
    make_step(opt, lambda: opt.select(model(data(0))))
    assert same(statistics(model), before)
    assert not model.training


def test_bn_counts_are_copied_as_bits() -> None:
    """These counts would be NaN if they were copied as floats."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
    for count in (2**61 + 12345, 0x7F8000017F800001, 0x7FF8000000000001):
        model[1].num_batches_tracked.fill_(count)
        opt.step(square_closure(lambda: model(torch.randn(4, 2))))
        assert int(model[1].num_batches_tracked) == count + 1


@covering(name=METHODS, pass_model=WITH_MODEL)
def test_perturbed_keeps_statistics(name: str, pass_model: bool) -> None:
    model, data = normed("2d")
    options = {"model": model} if pass_model else {}
    opt = make_method(name, torch.optim.SGD(model.parameters(), lr=0.01), rho=1.0, **options)
    opt.select(model(data(0))).backward()
    before = statistics(model)
    with opt.perturbed():
        model(data(1))
    assert same(statistics(model), before)


# --- threads ---------------------------------------------------------------------------------------


@with_and_without_model
def test_model_of_another_thread_is_not_affected(pass_model: bool) -> None:
    """Its layers run during our passes, and their updates are kept."""
    model, other = small_normed(), small_normed()

    def forward() -> Tensor:
        run_in_thread(lambda: other(X))
        return model(X)

    train_forward(forward, model.parameters(), model if pass_model else None)
    assert counts(model) == [3]
    assert counts(other) == [6], "once in each pass"


def test_optimizer_constructed_in_another_thread() -> None:
    model = small_normed()
    opt = run_in_thread(lambda: sam(model.parameters()))
    for _ in range(3):
        opt.step(square_closure(lambda: model(X)))
    assert counts(model) == [3]


# --- buffers that change ---------------------------------------------------------------------------


class Rebinding(nn.Module):
    """Creates new buffers instead of writing into the existing ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean = 0.9 * self.running_mean + 0.1 * x.mean(0).detach()
        self.num_batches_tracked = self.num_batches_tracked + 1
        return x


def test_buffers_replaced_in_a_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Rebinding())
    train(model, pass_model=True)
    assert counts(model) == [3]


def test_functional_call_keeps_the_modules_own_buffers() -> None:
    """Buffers passed to `functional_call` move once a step, and do not replace the module's."""
    model = small_normed()
    own = dict(model.named_buffers())
    passed = {name: b.clone() for name, b in own.items()}
    tensors = {**dict(model.named_parameters()), **passed}
    train_forward(lambda: functional_call(model, tensors, (X,)), model.parameters())
    assert all(model.get_buffer(name) is b for name, b in own.items())
    assert int(passed["1.num_batches_tracked"]) == 3
    assert int(own["1.num_batches_tracked"]) == 0


def test_buffers_shared_by_two_modules() -> None:
    """The second module is found after the first has changed them: the older copy is restored."""
    layer, again = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    again._buffers = dict(layer._buffers)
    train_forward(lambda: again(layer(X)), [*layer.parameters(), *again.parameters()], steps=1)
    assert counts(layer) == counts(again) == [2]


@with_and_without_model
def test_buffers_with_new_storage_between_steps(pass_model: bool) -> None:
    model = small_normed()
    opt = sam(model.parameters(), model if pass_model else None)
    for _ in range(3):
        opt.step(square_closure(lambda: model(X)))
        for buffer in model.buffers():
            buffer.data = buffer.data.clone()
    assert counts(model) == [3]


class Reassigning(Rebinding):
    """Gives its buffers new memory instead of writing into it."""

    def forward(self, x: Tensor) -> Tensor:
        self.running_mean.data = 0.9 * self.running_mean + 0.1 * x.mean(0).detach()
        self.num_batches_tracked.data = self.num_batches_tracked + 1
        return x


@with_and_without_model
def test_buffers_with_new_storage_in_a_pass(pass_model: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Reassigning())
    train(model, pass_model)
    assert counts(model) == [3]


def test_count_with_new_storage() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    opt = sam(model.parameters(), model)
    opt.step(square_closure(lambda: model(X)))
    model[1].num_batches_tracked.data = torch.tensor(10)
    for _ in range(2):
        opt.step(square_closure(lambda: model(X)))
    assert counts(model) == [12]


def test_buffers_created_in_inference_mode_are_skipped() -> None:
    with torch.inference_mode():
        features = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval().requires_grad_(False)
    head = nn.Linear(6, 1)
    opt = sam(head.parameters(), nn.Sequential(features, head))

    def forward() -> Tensor:
        with torch.no_grad():
            seen = features(X)
        return head(seen)

    for _ in range(2):
        opt.step(square_closure(forward))


# --- models that change ----------------------------------------------------------------------------


@with_and_without_model
def test_closure_that_calls_train_and_eval(pass_model: bool) -> None:
    model = small_normed().eval()
    opt = sam(model.parameters(), model if pass_model else None)

    def closure() -> Tensor:
        model.train()
        loss = square_closure(lambda: model(X))()
        model.eval()
        return loss

    for _ in range(5):
        opt.step(closure)
    assert counts(model) == [5]


@pytest.mark.parametrize("compile_something", [False, True])
@with_and_without_model
def test_closure_with_both_modes_equals_a_loop_by_hand(
    pass_model: bool, compile_something: bool
) -> None:
    """The pass in evaluation mode reads what the pass in training mode has just written."""
    if compile_something:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    models = small_normed().double(), small_normed().double()
    x = X.double()

    def loss(model: nn.Module) -> Tensor:
        trained = model.train()(x)
        return trained.square().mean() + (trained - model.eval()(x)).square().mean()

    weights = list(models[1].parameters())
    base = torch.optim.SGD(weights, lr=0.1)
    opt = sam(models[0].parameters(), models[0] if pass_model else None)
    for _ in range(10):
        make_step(opt, lambda: loss(models[0]))
        base.zero_grad()
        loss(models[1]).backward()
        before = [p.detach().clone() for p in weights]
        kept = statistics(models[1])
        norm = torch.sqrt(sum((p.grad**2).sum() for p in weights))
        with torch.no_grad():
            for p in weights:
                p.add_(0.5 * p.grad / norm)
        base.zero_grad()
        loss(models[1]).backward()
        with torch.no_grad():
            for p, w in zip(weights, before, strict=True):
                p.copy_(w)
        for name, buffer in models[1].named_buffers():
            buffer.copy_(kept[name])
        base.step()
    for p, q in zip(models[0].parameters(), weights, strict=True):
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-10)
    assert counts(models[0]) == counts(models[1]) == [10]


@with_and_without_model
def test_replaced_layer(pass_model: bool) -> None:
    """As SyncBatchNorm.convert_sync_batchnorm does."""
    model = small_normed()
    opt = sam(model.parameters(), model if pass_model else None)
    new = nn.BatchNorm1d(8)
    new.weight, new.bias = model[1].weight, model[1].bias
    for name, buffer in model[1].named_buffers():
        setattr(new, name, buffer)
    model[1] = new
    for _ in range(5):
        opt.step(square_closure(lambda: model(X)))
    assert counts(model) == [5]


def test_layer_added_with_its_parameter_group() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    opt = sam(model.parameters(), model)
    model.append(nn.BatchNorm1d(4))
    opt.add_param_group({"params": model[1].parameters()})
    for count in (1, 2):
        opt.step(square_closure(lambda: model(X)))
        assert counts(model) == [count]


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("affine", [True, False])
def test_inserted_layer(affine: bool, steps_before: int) -> None:
    """Its parameters, if it has any, are added before it is part of the model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    opt = sam(model.parameters(), model)
    for _ in range(steps_before):
        opt.step(square_closure(lambda: model(X)))
    layer = nn.BatchNorm1d(4, affine=affine)
    if affine:
        opt.add_param_group({"params": layer.parameters()})
    model[1] = layer
    for count in (1, 2):
        opt.step(square_closure(lambda: model(X)))
        assert counts(model) == [count]


def test_lazy_layer_initialized_later() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False)
            self.use = False

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.first(x)) if self.use else self.first(x)

    model = Late()
    opt = sam(model.first.parameters(), model)
    opt.step(square_closure(lambda: model(X)))
    model.use = True
    model(X)
    for _ in range(2):
        opt.step(square_closure(lambda: model(X)))
    assert counts(model) == [3]


@pytest.mark.parametrize("pass_model", WITH_MODEL)
def test_two_models_in_one_closure(pass_model: bool) -> None:
    """A generator's step also runs the discriminator; model= contains both."""
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    discriminator = small_normed()
    model = nn.ModuleList([generator, discriminator]) if pass_model else None
    train_forward(lambda: discriminator(generator(X)), generator.parameters(), model)
    assert counts(generator) == counts(discriminator) == [3]


# --- graphs and scripts ----------------------------------------------------------------------------


@with_and_without_model
def test_exported_model(pass_model: bool) -> None:
    """Its normalization is an operation of a graph, for which no module hook is called."""
    model = torch.export.export(small_normed().train(), (X,)).module()
    train(model, pass_model)
    assert counts(model) == [3]


@SCRIPTED
@covering(kind=["scripted", "traced"], part=[False, True], pass_model=WITH_MODEL)
def test_torchscript(kind: str, part: bool, pass_model: bool) -> None:
    make = torch.jit.script if kind == "scripted" else lambda m: torch.jit.trace(m, X)
    model = make(small_normed())
    if part:
        model = nn.Sequential(nn.Linear(4, 4), model, nn.BatchNorm1d(2))
    before = counts(model)  # tracing runs the model
    train(model, pass_model)
    assert counts(model) == [count + 3 for count in before]


@SCRIPTED
@with_and_without_model
def test_torchscript_without_statistics(pass_model: bool) -> None:
    part = torch.jit.script(nn.ReLU())
    train(nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 2)), pass_model)


# --- spectral norms --------------------------------------------------------------------------------

SPECTRAL_NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "hook": nn.utils.spectral_norm,
    "parametrization": nn.utils.parametrizations.spectral_norm,
}
SPECTRAL = pytest.mark.parametrize("kind", SPECTRAL_NORMS)


def spectral(kind: str) -> nn.Sequential:
    """A model whose singular vectors are far from converged."""
    torch.manual_seed(0)
    model = nn.Sequential(SPECTRAL_NORMS[kind](nn.Linear(6, 6)), nn.Linear(6, 2)).double()
    for name, vector in model.named_buffers():
        if name.endswith(("_u", "_v")):
            vector.copy_(nn.functional.normalize(torch.randn_like(vector), dim=0))
    return model


def recording_closure(model: nn.Module, gradients: list[Tensor]) -> Callable[[], Tensor]:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def closure() -> Tensor:
        loss = square_closure(lambda: model(x))()
        found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        gradients.append(torch.cat(found))
        return loss

    return closure


@with_and_without_model
@SPECTRAL
def test_spectral_norm_is_the_same_function_in_both_passes(kind: str, pass_model: bool) -> None:
    """At a tiny radius g1 equals g0, and the vectors have moved as in one pass."""
    model = spectral(kind)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wsam.WSAM(base, rho=1e-9, model=model if pass_model else None)
    for _ in range(3):
        twin, gradients = spectral(kind), []
        twin.load_state_dict(model.state_dict())
        recording_closure(twin, [])()
        opt.step(recording_closure(model, gradients))
        first, second = gradients
        assert (second - first).norm() < 1e-7 * first.norm()
        assert all(map(torch.equal, model.buffers(), twin.buffers()))


@with_and_without_model
@SPECTRAL
def test_spectral_norm_iterates_after_an_error(kind: str, pass_model: bool) -> None:
    model = spectral(kind)
    opt = sam(model.parameters(), model if pass_model else None)
    passes: list[Tensor] = []

    def fails() -> Tensor:
        loss = recording_closure(model, passes)()
        if len(passes) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(fails)
    before = statistics(model)
    recording_closure(model, [])()
    assert not same(statistics(model), before)


@with_and_without_model
def test_spectral_norm_of_a_vector(pass_model: bool) -> None:
    """It needs no power iteration."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4), "bias")
    train(nn.Sequential(layer, nn.Linear(4, 2)), pass_model)


def norm_of(layer: nn.Module) -> Any:
    (hook,) = layer._forward_pre_hooks.values() or [None]
    return hook or layer.parametrizations.weight[0]


def square_layer(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return SPECTRAL_NORMS[kind](nn.Linear(4, 4))


def chain(*layers: nn.Module) -> Callable[[], Tensor]:
    return square_closure(lambda: functools.reduce(lambda x, layer: layer(x), layers, X))


@SPECTRAL
def test_spectral_norms_of_two_modules(kind: str) -> None:
    one, two = square_layer(kind), square_layer(kind)
    sam([*one.parameters(), *two.parameters()]).step(chain(one, two))
    for norm in map(norm_of, (one, two)):
        assert type(norm.n_power_iterations) is int
        assert norm.n_power_iterations == 1


@with_and_without_model
@SPECTRAL
def test_number_of_power_iterations_may_be_set(kind: str, pass_model: bool) -> None:
    """Between steps and inside the second pass."""
    layer = square_layer(kind)
    opt = sam(layer.parameters(), layer if pass_model else None)
    closure, norm = chain(layer), norm_of(layer)
    for iterations in (1, 5, 0, 2):
        norm.n_power_iterations = iterations
        opt.step(closure)
        assert norm.n_power_iterations == iterations
    closure()
    opt.ascend()
    closure()
    norm.n_power_iterations = 7
    opt.descend()
    opt.step()
    assert norm.n_power_iterations == 7


@SPECTRAL
def test_spectral_norm_added_between_steps(kind: str) -> None:
    layer = nn.Linear(4, 4)
    opt = sam(layer.parameters(), layer)
    opt.step(chain(layer))
    SPECTRAL_NORMS[kind](layer)
    iterations = []

    def closure() -> Tensor:
        iterations.append(norm_of(layer).n_power_iterations)
        return chain(layer)()

    opt.step(closure)
    assert iterations == [1, 0]


# --- a batch that is skipped -----------------------------------------------------------------------


@pytest.mark.parametrize("pass_model", [True, False])
@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("style", ["closure", "closures", "hand"])
def test_a_nan_batch_leaves_the_statistics(style: str, policy: str, pass_model: bool) -> None:
    """Nothing changes in a skipped step, so the next batch trains as if it had not been there."""
    models, bad = (small_normed(), small_normed()), torch.full((4, 4), torch.nan)
    weights = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    opt, twin = (
        wsam.SAM(base, model=m if pass_model else None, nonfinite=policy)
        for base, m in zip(weights, models, strict=True)
    )

    def step(opt: wsam.SharpnessAware, model: nn.Module, x: Tensor) -> None:
        def run() -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if style == "hand":
            opt.begin()
            run()
            if opt.ascend():
                run()
            opt.descend()
            opt.step()
        else:
            opt.step(run if style == "closure" else [run, run])

    good = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    step(opt, models[0], good)
    before = {name: b.clone() for name, b in statistics(models[0]).items()}
    if policy == "skip":
        step(opt, models[0], bad)
    else:
        with pytest.raises(FloatingPointError):
            step(opt, models[0], bad)
        opt.abandon()
    assert opt.skipped == (policy == "skip")
    for name, buffer in statistics(models[0]).items():
        assert torch.equal(buffer, before[name]), name
    step(opt, models[0], good)
    for _ in range(2):
        step(twin, models[1], good)
    for one, other in zip(
        models[0].state_dict().values(), models[1].state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)


def test_a_nan_batch_leaves_the_statistics_of_an_inserted_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = wsam.SAM(base, model=model, nonfinite="skip")
    opt.step(square_closure(lambda: model(X)))
    model[1] = nn.BatchNorm1d(4, affine=False)
    opt.step(square_closure(lambda: model(X * torch.nan)))
    assert opt.skipped == 1
    assert counts(model) == [0]
    assert torch.equal(model[1].running_mean, torch.zeros(4))


# --- model= without all modules --------------------------------------------------------------------


def test_model_without_a_layer_that_runs_is_rejected() -> None:
    """Its statistics would move twice a step."""
    model, other = small_normed(), small_normed()
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=other)
    weights, x = [p.clone() for p in model.parameters()], torch.randn(4, 4)

    def run() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for step in (1, 2):  # also when it is tried again
        with pytest.raises(RuntimeError, match=r"BatchNorm1d in training.*not part of\s+model="):
            opt.step(run)
        assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
        assert counts(model) == [step] * len(counts(model))
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_layer_in_evaluation_mode_may_be_outside_of_model() -> None:
    model, fixed = small_normed(), small_normed().eval()
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    x = torch.randn(4, 4)

    def run() -> Tensor:
        loss = (model(x) - fixed(x)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(run)
    assert counts(model) == [2] * len(counts(model))


@SPECTRAL
def test_model_without_a_spectral_norm_that_runs_is_rejected(kind: str) -> None:
    """Its power iteration would run twice a step, and g1 be that of another function."""
    model, other = nn.Linear(4, 4), square_layer(kind)
    opt = sam(model.parameters(), model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"in training.*not part.*power iteration"):
            opt.step(chain(model, other))
    other.eval()
    opt.step(chain(model, other))


def test_model_is_checked_after_steps_without_a_second_pass() -> None:
    model, other = small_normed(), nn.BatchNorm1d(2)
    base, when = torch.optim.SGD(model.parameters(), lr=0.1), wsam.schedule.Between(2)
    opt = wsam.SAM(base, when=when, model=model)
    for _ in range(2):
        chain(model, other)()
        assert not opt.ascend()
        opt.step()
    chain(model, other)()
    opt.ascend()
    with pytest.raises(RuntimeError, match="not part of"):
        chain(model, other)()


def test_model_is_checked_after_an_evaluation_at_perturbed_weights() -> None:
    model, other = small_normed(), nn.BatchNorm1d(2)
    opt, criterion = sam(model.parameters(), model), nn.MSELoss()
    chain(model, other)()
    both = nn.ModuleList([model, other])
    both.eval()
    with opt.perturbed():
        criterion(other(model(X)), torch.zeros(len(X), 2))  # a criterion is in training mode
    both.train()
    with pytest.raises(RuntimeError, match="not part of"):
        opt.step(chain(model, other))
