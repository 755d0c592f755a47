"""Passes on a part of the batch: ESAM's selected samples, and ascent on a share."""

import copy
from typing import Any

import pytest
import torch
from helpers import batch, same, small_model
from torch import Tensor, nn

import wsam


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def esam(model: nn.Module) -> wsam.ESAM:
    return wsam.ESAM(sgd(model), rho=0.3, gamma=0.4, model=model)


class Samples:
    """A loss function that counts the samples of its passes with and without gradients."""

    def __init__(self, opt: wsam.SharpnessAware, model: nn.Module) -> None:
        self.opt, self.model = opt, model
        self.seen: list[tuple[int, bool]] = []

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append((len(x), torch.is_grad_enabled()))
        out = self.model(x)
        return self.opt.select((out**2).sum(1)), out


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}])
def test_esam_computes_gradients_of_the_selected_samples_alone(options: dict[str, Any]) -> None:
    """The result is that of selecting losses, for a model whose samples do not interact."""
    models = small_model(), small_model()
    opts = [esam(model) for model in models]
    functions = [Samples(opt, model) for opt, model in zip(opts, models, strict=True)]
    steps = [
        wsam.train_step(opt, function, gather_selected=gather, **options)
        for opt, function, gather in zip(opts, functions, [True, False], strict=True)
    ]
    for t in range(5):
        (loss, out), (other, whole) = (step(batch(t)) for step in steps)
        assert torch.allclose(loss, other, rtol=1e-10)
        assert torch.allclose(out, whole, rtol=1e-10)
        assert torch.allclose(opts[0].sharpness, opts[1].sharpness, rtol=1e-10)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-10, atol=1e-12)
    if not options:
        assert functions[0].seen[:3] == [(10, True), (10, False), (4, True)]
        assert functions[1].seen[:2] == [(10, True), (10, True)]


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_sharpness_is_that_of_all_samples(micro_batches: int, gather: bool) -> None:
    """Whatever samples are selected, and also if micro-batches have different sizes."""
    model = small_model()
    opt = wsam.SAM(sgd(model), rho=0.3, keep=0.4, model=model)
    x = batch(0)

    def losses() -> Tensor:
        return (model(x) ** 2).sum(1)

    before = losses().mean()
    before.backward()
    with opt.perturbed(), torch.no_grad():
        wanted = losses().mean() - before
    step = wsam.train_step(
        opt,
        lambda x: opt.select((model(x) ** 2).sum(1)),
        micro_batches=micro_batches,
        gather_selected=gather,
    )
    step(x)
    assert torch.allclose(opt.sharpness, wanted, rtol=1e-10)


def test_sharpness_of_perturbed_micro_batches() -> None:
    """It is the mean of theirs, weighted by their sizes."""
    model = small_model()
    opt = wsam.SAM(sgd(model), rho=0.3, keep=0.4, model=model)
    x = batch(0)
    wanted = torch.zeros((), dtype=torch.float64)
    for part in (x[:3], x[3:6], x[6:]):
        before = (model(part) ** 2).sum(1).mean()
        before.backward()
        with opt.perturbed(), torch.no_grad():
            after = (model(part) ** 2).sum(1).mean()
        wanted = wanted + len(part) / len(x) * (after - before.detach())
        opt.zero_grad()
    step = wsam.train_step(
        opt,
        lambda x: opt.select((model(x) ** 2).sum(1)),
        micro_batches=3,
        perturb_per_micro_batch=True,
    )
    step(x)
    assert torch.allclose(opt.sharpness, wanted, rtol=1e-10)


def test_esam_gathers_keyword_batches() -> None:
    model = small_model()
    opt = esam(model)
    sizes: list[int] = []

    def loss_fn(x: Tensor, target: dict[str, Tensor], scale: float) -> Tensor:
        sizes.append(len(target["y"]))
        return opt.select(scale * ((model(x) - target["y"]) ** 2).sum(1))

    x = batch(0)
    wsam.train_step(opt, loss_fn)(x=x, target={"y": x[:, :2]}, scale=0.5)
    assert sizes == [10, 10, 4]


def test_esam_with_a_grad_scaler() -> None:
    models = small_model(), small_model()
    opts = [esam(model) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = wsam.train_step(opts[0], Samples(opts[0], models[0]), scaler=scaler)
    plain = wsam.train_step(opts[1], Samples(opts[1], models[1]))
    for t in range(3):
        scaled(batch(t))
        plain(batch(t))
    assert same(list(models[0].parameters()), list(models[1].parameters()))


def test_samples_are_selected_in_the_precision_of_the_passes() -> None:
    model = small_model().float()
    opt = esam(model)
    seen: list[tuple[bool, torch.dtype]] = []

    def loss_fn(x: Tensor) -> Tensor:
        out = model(x)
        seen.append((torch.is_grad_enabled(), out.dtype))
        return opt.select((out.float() ** 2).sum(1))

    wsam.train_step(opt, loss_fn, autocast=torch.bfloat16)(batch(0).float())
    assert seen == [(grad, torch.bfloat16) for grad in (True, False, True)]


def test_esam_gathers_tensors_of_one_size() -> None:
    model = small_model()
    opt = esam(model)
    step = wsam.train_step(opt, lambda x, c: opt.select((c * model(x) ** 2).sum(1).flatten()))
    step(batch(0), torch.tensor(2.0))
    with pytest.raises(ValueError, match=r"gather_selected divides .* found: \[1, 10\]"):
        step(batch(0), torch.ones(1, 1))


@pytest.mark.parametrize("kind", ["twice", "pairs of samples", "parts of samples"])
def test_esam_that_does_not_select_samples_is_rejected(kind: str) -> None:
    model = small_model()
    opt = esam(model)

    def loss_fn(x: Tensor) -> Tensor:
        squares = model(x) ** 2
        if kind == "twice":
            return opt.select(squares.sum(1)) + opt.select(squares[:, 0])
        return opt.select(squares.view(5, -1).sum(1) if kind == "pairs of samples" else squares)

    with pytest.raises(ValueError, match=r"does not call select once.*gather_selected=False"):
        wsam.train_step(opt, loss_fn)(batch(0))
    wsam.train_step(opt, loss_fn, gather_selected=False)(batch(0))


def test_a_loss_function_that_does_not_select_uses_all_samples() -> None:
    models = small_model(), small_model()
    plain = wsam.SAM(sgd(models[1]))
    step = wsam.train_step(
        wsam.SAM(sgd(models[0]), keep=0.5), lambda x: models[0](x).square().mean()
    )
    with pytest.warns(wsam.WsamWarning, match="no per-sample losses, so all samples are used"):
        step(batch(0))
    wsam.train_step(plain, lambda x: models[1](x).square().mean())(batch(0))
    assert same(list(models[0].parameters()), list(models[1].parameters()))


def test_statistics_move_once() -> None:
    """The pass that selects samples must not move them either."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    opt = esam(model)
    step = wsam.train_step(opt, Samples(opt, model))
    twin = copy.deepcopy(model)
    twin(batch(0))
    step(batch(0))
    assert int(model[1].num_batches_tracked) == 1
    assert torch.equal(model[1].running_mean, twin[1].running_mean)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("method", ["wsam", "looksam"])
def test_steps_that_reuse_use_all_samples(method: str, gather: bool) -> None:
    """A GradScaler needs their second pass, at w, whose gradient the base then receives."""
    options = {"when": wsam.schedule.Every(2), "keep": 0.4}
    options |= {"reuse": True} if method == "wsam" else {}
    models = small_model(), small_model()
    scalers = None, torch.amp.GradScaler("cpu", init_scale=4.0)
    for model, scaler in zip(models, scalers, strict=True):
        opt = wsam.create(method, sgd(model), **options)
        loss_fn = Samples(opt, model)
        step = wsam.train_step(opt, loss_fn, scaler=scaler, gather_selected=gather)
        for t in range(4):
            step(batch(t))
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-10, atol=1e-12)


def test_ascent_share() -> None:
    """d is computed from the first samples, and the base receives g1 of the whole batch."""
    models = small_model(), small_model()
    opts = [wsam.SAM(sgd(model), rho=0.3) for model in models]

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) ** 2).sum(1).mean()

    step = wsam.train_step(opts[0], lambda x: loss_of(models[0], x), ascent_share=0.3)
    for t in range(3):
        x = batch(t)
        loss, _ = step(x)
        opts[1].begin()
        expected = loss_of(models[1], x[:3])
        expected.backward()
        opts[1].ascend()
        loss_of(models[1], x).backward()
        opts[1].descend()
        opts[1].step()
        assert torch.equal(loss, expected.detach())
    assert same(list(models[0].parameters()), list(models[1].parameters()))


@pytest.mark.parametrize("scaled", [False, True])
def test_steps_between_use_the_whole_batch(scaled: bool) -> None:
    """With an interval, ascent_share has an effect on the steps that it chooses only."""
    when = wsam.schedule.Every(2) & wsam.schedule.Between(1)
    models = small_model(torch.float32), small_model(torch.float32)
    opts = [wsam.SAM(sgd(model), rho=0.3, when=when) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    seen: list[int] = []

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) ** 2).sum(1).mean()

    def loss_fn(x: Tensor) -> Tensor:
        seen.append(len(x))
        return loss_of(models[0], x)

    step = wsam.train_step(opts[0], loss_fn, scaler=scaler, ascent_share=0.3)
    for t in range(5):
        x = batch(t).float()
        step(x)
        opts[1].begin()
        loss_of(models[1], x[:3] if t in (2, 4) else x).backward()
        if opts[1].ascend():
            loss_of(models[1], x).backward()
            opts[1].descend()
        opts[1].step()
    assert seen == [10, 10, 3, 10, 10, 3, 10]
    assert same(list(models[0].parameters()), list(models[1].parameters()))


def test_ascent_share_does_not_count_for_an_interval() -> None:
    """An interval of the user's own may have state, which changes once in a step."""

    class EveryThirdCall(wsam.schedule.Interval):
        calls = 0

        def chosen(self, step: int, norm: Any) -> bool:
            self.calls += 1
            return self.calls % 3 == 0

        def remember(self) -> int:
            return self.calls

        def recall(self, memory: int) -> None:
            self.calls = memory

    model, seen = small_model(), []
    opt = wsam.SAM(sgd(model), when=EveryThirdCall())

    def loss_fn(x: Tensor) -> Tensor:
        seen.append(len(x))
        return (model(x) ** 2).mean()

    step = wsam.train_step(opt, loss_fn, ascent_share=0.5)
    for t in range(3):
        step(batch(t))
    assert seen == [10, 10, 5, 10]


def test_ascent_share_and_an_interval_of_norms() -> None:
    opt = wsam.SAM(sgd(small_model()), when=wsam.schedule.NormAbove())
    with pytest.raises(ValueError, match="reads the gradient norm"):
        wsam.train_step(opt, lambda x: x, ascent_share=0.5)


def test_ascent_share_begins_with_the_radius() -> None:
    model, sizes = small_model(), []

    def loss_fn(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return (model(x) ** 2).mean()

    opt = wsam.SAM(sgd(model), rho=wsam.schedule.Warmup(0.3, steps=10))
    step = wsam.train_step(opt, loss_fn, ascent_share=0.3)
    for t in range(2):
        step(batch(t))
    assert sizes == [10, 3, 10]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("options", [{}, {"ascent_steps": 2}], ids=["one", "two"])
def test_a_radius_of_zero_uses_the_whole_batch(options: dict[str, Any], scaled: bool) -> None:
    """A step without a perturbation is the base's own, so ascent_share has no effect on it."""
    models = small_model(torch.float32), small_model(torch.float32)
    radius = wsam.schedule.Warmup(0.3, steps=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    opt, base = wsam.SAM(sgd(models[0]), rho=radius, **options), sgd(models[1])

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) ** 2).sum(1).mean()

    x = batch(0).float()
    step = wsam.train_step(opt, lambda x: loss_of(models[0], x), scaler=scaler, ascent_share=0.3)
    loss, _ = step(x)
    expected = loss_of(models[1], x)
    expected.backward()
    base.step()
    assert torch.equal(loss, expected.detach())
    assert same(list(models[0].parameters()), list(models[1].parameters()))


@pytest.mark.parametrize(
    "make",
    [
        wsam.WSAM,
        lambda base: base,
    ],
)
def test_ascent_share_needs_a_rule_without_g0(make: Any) -> None:
    with pytest.raises(ValueError, match="ascent_share needs a method"):
        wsam.train_step(make(sgd(small_model())), lambda x: x, ascent_share=0.5)


@pytest.mark.parametrize(("keep", "micro_batches"), [(0.5, 1), (1.0, 2)])
def test_ascent_share_needs_a_batch_that_is_not_divided(keep: float, micro_batches: int) -> None:
    opt = wsam.SAM(sgd(small_model()), keep=keep)
    with pytest.raises(ValueError, match="does not support micro_batches, ESAM's selection"):
        wsam.train_step(opt, lambda x: x, ascent_share=0.5, micro_batches=micro_batches)
