"""Errors of wsam.curvature: invalid models, data, losses and arguments."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from wsam.curvature import (
    average_sharpness,
    empirical_fisher,
    gauss_newton,
    hessian,
    landscape,
    random_direction,
    sharpness,
)

X, Y = torch.randn(12, 4), torch.arange(12) % 3
DATA = [(X[:8], Y[:8]), (X[8:], Y[8:])]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))


@pytest.mark.parametrize("build", [hessian, gauss_newton, empirical_fisher, sharpness])
def test_invalid_models_and_data(build):
    with pytest.raises(ValueError, match="no parameters"):
        build(nn.ReLU(), F.cross_entropy, DATA)
    with pytest.raises(ValueError, match="the data is empty"):
        build(model(), F.cross_entropy, [])
    with pytest.raises(TypeError, match="only once"):
        build(model(), F.cross_entropy, (batch for batch in DATA))
    with pytest.raises(TypeError, match="a list or a loader"):
        build(model(), F.cross_entropy, X)
    for batch in ((X, Y), [X, Y]):
        with pytest.raises(TypeError, match=r"list of \(input, target\) pairs: \[\(x, y\)\]"):
            build(model(), F.cross_entropy, batch)
    with pytest.raises(ValueError, match="loss of batch 1 is nan"):
        build(model(), F.cross_entropy, [DATA[0], (X[8:] * torch.nan, Y[8:])])
    with pytest.raises(ValueError, match=r"one number for a batch, it returned \(8,\)"):
        build(model(), lambda out, y: F.cross_entropy(out, y, reduction="none"), DATA)
    with pytest.raises(ValueError, match="mode must be"):
        build(model(), F.cross_entropy, DATA, mode="both")
    with pytest.raises(ValueError, match="reduction must be"):
        build(model(), F.cross_entropy, DATA, reduction="none")


def test_dropout_is_off_in_eval_mode_and_an_error_in_train_mode():
    active = model().train()
    H = hessian(active, F.cross_entropy, DATA)
    v = torch.randn(H.shape[0])
    torch.testing.assert_close(H @ v, H @ v, rtol=1e-5, atol=1e-6)
    assert active.training
    with pytest.raises(ValueError, match="dropout active"):
        hessian(active, F.cross_entropy, DATA, mode="train")
    with pytest.raises(ValueError, match="dropout active"):
        hessian(nn.Linear(4, 3), lambda out, y: F.cross_entropy(F.dropout(out, 0.05), y), DATA)


class Augmented:
    """Batches with new noise in every pass."""

    def __iter__(self):
        return ((x + torch.randn_like(x), y) for x, y in DATA)


def group_sharpness(net, loss_fn, batches, **options):
    return sharpness(net, loss_fn, batches, m=4, **options)


def line(net, loss_fn, batches, **options):
    return landscape(net, loss_fn, batches, random_direction(net), [0.0, 1.0], **options)


@pytest.mark.parametrize("measure", [sharpness, group_sharpness, average_sharpness, line])
def test_measures_of_changing_data_raise(measure):
    net = model()
    with pytest.raises(ValueError, match="augmented at random"):
        measure(net, F.cross_entropy, Augmented())
    measure(net, F.cross_entropy, Augmented(), check=False)
    loader = DataLoader(TensorDataset(X, Y), batch_size=6, shuffle=True)
    measure(net, F.cross_entropy, loader)


def test_the_error_about_changing_data_names_shuffled_loaders():
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(12, 4), Y)
    message = r"shuffled and used with drop_last or mode='train', pass list\(loader\)"
    for drop_last, mode in ((True, "eval"), (False, "train")):
        loader = DataLoader(data, batch_size=5, shuffle=True, drop_last=drop_last)
        with pytest.raises(ValueError, match=message):
            hessian(net, F.cross_entropy, loader, mode=mode) @ torch.ones(53)
        hessian(net, F.cross_entropy, list(loader), mode=mode) @ torch.ones(53)


def test_products_with_changing_data_raise_and_shuffled_data_works():
    for build in (hessian, gauss_newton):
        with pytest.raises(ValueError, match="augmented at random"):
            build(net := model(), F.cross_entropy, Augmented()) @ torch.ones(43)
    hessian(net, F.cross_entropy, Augmented(), check=False) @ torch.ones(43)

    class Shrinking:
        def __init__(self):
            self.passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(DATA[: 3 - self.passes])

    with pytest.raises(ValueError, match="12 samples in 2 batches, then 8 in 1"):
        hessian(model(), F.cross_entropy, Shrinking()) @ torch.ones(43)
    loader = DataLoader(TensorDataset(X, Y), batch_size=5, shuffle=True)
    H = hessian(net := model(), F.cross_entropy, loader)
    v = torch.randn(H.shape[0])
    expected = hessian(net, F.cross_entropy, DATA) @ v
    torch.testing.assert_close(H @ v, expected, rtol=1e-4, atol=1e-6)


def test_losses_that_cancel_to_zero_may_differ_by_rounding():
    signed = TensorDataset(torch.cat([X, X]), torch.cat([torch.ones(12), -torch.ones(12)]))
    for seed in range(5):
        loader = DataLoader(signed, 5, shuffle=True, generator=torch.Generator().manual_seed(seed))
        hessian(model(), lambda out, sign: (out.sum(1) * sign).mean(), loader) @ torch.ones(43)


def test_model_may_be_trained_between_products():
    net = nn.Linear(4, 3)
    H = hessian(net, F.cross_entropy, DATA)
    with torch.no_grad():
        net.weight.mul_(3)
    v = torch.ones(15)
    torch.testing.assert_close(H @ v, hessian(net, F.cross_entropy, DATA) @ v)


@pytest.mark.parametrize("check", [True, False])
def test_info_has_the_loss_of_the_last_product(check):
    net, v = nn.Linear(4, 3), torch.ones(15)
    H = hessian(net, F.cross_entropy, DATA, check=check)
    built = H.info.loss
    H @ v
    assert H.info.loss == built, "bitwise"
    for _ in range(2):
        with torch.no_grad():
            net.weight.mul_(10)
        now = hessian(net, F.cross_entropy, DATA).info.loss
        assert abs(now - built) > 0.1
        H @ v
        assert H.info.loss == pytest.approx(now, rel=1e-5)


def test_invalid_precisions():
    with pytest.raises(
        ValueError, match=r"float32 or float64; the parameters are \{torch.bfloat16\}"
    ):
        hessian(model().bfloat16(), F.cross_entropy, DATA)
    low = model().bfloat16()
    assert hessian(low, F.cross_entropy, DATA, dtype=torch.float32).dtype == torch.float32
    mixed = model()
    mixed[0].double()
    with pytest.raises(ValueError, match="choose one with the argument dtype"):
        hessian(mixed, F.cross_entropy, DATA)
    for dtype in (None, torch.float32):  # a cast would drop the imaginary parts
        with pytest.raises(ValueError, match="select real parameters with the argument params"):
            hessian(nn.Linear(4, 3, dtype=torch.complex64), F.cross_entropy, DATA, dtype=dtype)


def test_gauss_newton_and_fisher_need_one_output_tensor():
    class Dictionary(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return {"logits": self.inner(x)}

    loss = lambda out, y: F.cross_entropy(out["logits"], y)  # noqa: E731
    v = torch.ones(15)
    assert (hessian(Dictionary(), loss, DATA) @ v).shape == (15,)
    with pytest.raises(TypeError, match="output is one tensor, got dict: wrap the model"):
        gauss_newton(Dictionary(), loss, DATA) @ v

    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()

    pooled = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))
    for net in (pooled, Mean(4, 3)):
        with pytest.raises(ValueError, match="one output per sample"):
            empirical_fisher(net, lambda out, y: out.square().mean(), DATA) @ v
    normal = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="mixes samples"):
        empirical_fisher(normal, F.cross_entropy, DATA, mode="train")
    assert empirical_fisher(nn.Linear(4, 3), F.cross_entropy, DATA, mode="train").shape == (15, 15)
    untracked = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(ValueError, match="mixes samples"):
        empirical_fisher(untracked, F.cross_entropy, DATA)


def test_loss_independent_of_the_weights():
    net = model()
    net.unused = nn.Parameter(torch.ones(1))
    for loss_fn, options in (
        (lambda out, y: y.float().mean(), {}),
        (F.cross_entropy, {"params": ["unused"]}),
    ):
        H = hessian(net, loss_fn, DATA, **options)
        with pytest.raises(ValueError, match="the loss does not depend on any"):
            H @ torch.ones(H.shape[0])


def test_products_that_overflow_raise():
    net = nn.Linear(1, 1, bias=False)
    H = hessian(net, lambda out, y: (out - out.detach() + 1).pow(2).mean(), [(X[:, :1] * 1e25, Y)])
    with pytest.raises(ValueError, match="not finite at these weights"):
        H @ torch.ones(1)
    assert (H @ torch.full((1,), torch.nan)).isnan().all(), "the vector, not the curvature"


def test_wrappers_are_removed_in_any_order():
    net, compiled, parallel = model(), torch.compile, nn.DataParallel
    v = torch.randn(43)
    expected = hessian(net, F.cross_entropy, DATA) @ v
    for wrapped in (compiled(net), parallel(compiled(net)), compiled(parallel(compiled(net)))):
        H = hessian(wrapped, F.cross_entropy, DATA)
        assert H.objective.model is net
        torch.testing.assert_close(H @ v, expected)


@pytest.mark.parametrize("measure", [sharpness, average_sharpness])
def test_invalid_radii(measure):
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"(rho|sigma) must be in \(0, inf\)"):
            measure(model(), F.cross_entropy, DATA, wrong)
    with pytest.raises(ValueError, match="eta must be"):
        measure(model(), F.cross_entropy, DATA, 0.1, eta=-1)
    with pytest.raises(ValueError, match="at least 1"):
        measure(
            model(),
            F.cross_entropy,
            DATA,
            0.1,
            **{"steps" if measure is sharpness else "samples": 0},
        )


@pytest.mark.parametrize("build", [hessian, gauss_newton, empirical_fisher])
def test_invalid_differentiation_and_vectors(build):
    with pytest.raises(ValueError, match="differentiation must be 'auto', 'reverse' or 'forward'"):
        build(model(), F.cross_entropy, DATA, differentiation="backward")
    operator = build(model(), F.cross_entropy, DATA)
    for shape in [(), (3,), (44,), (1, 43), (43, 1, 1)]:
        with pytest.raises(ValueError, match="needs a vector of 43 numbers"):
            operator @ torch.ones(shape)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf")])
def test_invalid_step_sizes(wrong):
    with pytest.raises(ValueError, match=r"step_size must be in \(0, inf\)"):
        sharpness(model(), F.cross_entropy, DATA, steps=2, step_size=wrong)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("measure", [sharpness, group_sharpness, average_sharpness, line])
def test_batches_that_can_be_read_only_once(measure, check):
    class Once:
        def __init__(self):
            self.rest = iter(DATA)

        def __iter__(self):
            return self.rest

    with pytest.raises(ValueError, match="in every pass: the data is empty, or can be read only"):
        measure(model(), F.cross_entropy, Once(), check=check)
    with pytest.raises(ValueError, match="in every pass: the data is empty, or can be read only"):
        hessian(model(), F.cross_entropy, Once(), check=check) @ torch.ones(43)
