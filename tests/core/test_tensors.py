"""Promises about unusual tensors: sparse, complex, shared, of several kinds, of low precision."""

import warnings
from dataclasses import replace

import pytest
import reference
import torch
from helpers import MEMBERS, STYLES, closure, gap, make_step, member, same, small_model, snapshot
from torch import Tensor, nn

import wsam


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", MEMBERS)
def test_sparse_grad(name: str, style: str) -> None:
    """A sparse gradient is refused by name, and nothing has moved."""
    table = nn.Embedding(5, 3, sparse=True)
    opt = member(name, torch.optim.SGD(table.parameters(), lr=0.1))
    before = snapshot(opt)
    rows = torch.tensor([1, 3])
    with pytest.raises((TypeError, RuntimeError, ValueError), match="sparse"):
        make_step(opt, lambda: opt.select((table(rows) ** 2).sum(1)), style)
    assert same(snapshot(opt), before)


@pytest.mark.parametrize("name", MEMBERS)
def test_complex_param(name: str) -> None:
    """Complex parameters are refused when the optimizer is made."""
    p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises((TypeError, ValueError), match="complex"):
        member(name, torch.optim.SGD([p], lr=0.1))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", MEMBERS)
def test_tied(name: str, style: str) -> None:
    """A weight that two layers share is perturbed and stepped once."""
    torch.manual_seed(2)
    one, two = nn.Linear(4, 4, bias=False).double(), nn.Linear(4, 4, bias=False).double()
    two.weight = one.weight
    model = nn.Sequential(one, nn.Tanh(), two)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)

    def losses(w: list[Tensor]) -> Tensor:
        return ((torch.tanh(x @ w[0].T) @ w[0].T) ** 2).sum(1)

    option = {"beta": 1.0} if name == "esam" else {}  # of one tensor, all or nothing is chosen
    method = replace(reference.MEMBERS[name], beta=1.0)
    judge, w = reference.Base("sgd", 0.1, momentum=0.9), [one.weight.detach().clone()]
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), **option)
    for t in range(3):
        mask = opt.geometry.mask(t, 1)
        g0, g1 = reference.two_gradients(method, w, losses, mask)
        w = reference.update(method, judge, w, g0, g1)
        make_step(opt, lambda: opt.select((model(x) ** 2).sum(1)), style)
    assert gap([one.weight], w) < 1e-12
    assert two.weight is one.weight


def two_kinds(other: torch.dtype | torch.device) -> tuple[nn.Parameter, nn.Parameter]:
    start = torch.tensor([3.0, -1.0]), torch.tensor([0.5, 2.0, -4.0])
    return nn.Parameter(start[0].double()), nn.Parameter(start[1].double().to(other))


def check_one_norm(other: torch.dtype | torch.device, name: str, tolerance: float) -> None:
    """Both kinds together are perturbed by one vector of length rho, as one kind would be."""
    params, twins = two_kinds(other), two_kinds(torch.float64)
    opts = [
        member(name, torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False), rho=0.3)
        for ps in (params, twins)
    ]
    for opt, (p, q) in zip(opts, (params, twins), strict=True):

        def each(p: Tensor = p, q: Tensor = q) -> Tensor:
            return ((p**4).sum() + (q.double() ** 4).sum().to(p.device)).reshape(1)

        for _ in range(2):
            make_step(opt, lambda opt=opt, each=each: opt.select(0.01 * each()))
    found = [p.detach().double().cpu() for p in params]
    assert gap(found, [p.detach() for p in twins]) < tolerance


@pytest.mark.parametrize("name", MEMBERS)
def test_mixed_dtype(name: str) -> None:
    check_one_norm(torch.float32, name, 1e-5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MEMBERS)
def test_mixed_device(name: str) -> None:
    check_one_norm(torch.device("cuda"), name, 1e-10)


@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_is_float32_at_least(dtype: torch.dtype) -> None:
    """A norm summed up in bfloat16 stops growing at a few hundred; in float16 it overflows."""
    n = 100_000
    p = nn.Parameter(torch.zeros(n, dtype=dtype))
    opt = wsam.SAM(torch.optim.SGD([p], lr=0.1), rho=1.0)
    p.grad = torch.full((n,), 3.0, dtype=dtype)
    with opt.perturbed():
        length = p.detach().double().norm().item()
    assert length == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MEMBERS)
def test_bf16_vanishing(name: str, dtype: torch.dtype) -> None:
    """At rho 0.05 most bfloat16 weights do not move at all: that is said, once."""
    model = small_model(dtype)
    with pytest.warns(wsam.WsamWarning, match=r"bfloat16|float16|precision"):
        opt = member(name, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error", wsam.WsamWarning)
        opt.step(closure(opt, model))
        member(name, torch.optim.SGD(small_model().parameters(), lr=0.1))
    assert all(p.dtype == dtype for p in model.parameters())


@pytest.mark.parametrize("name", MEMBERS)
def test_views_and_strides(name: str) -> None:
    """Transposed, channels-last and empty parameters give what contiguous ones give."""
    generator = torch.Generator().manual_seed(4)
    start = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    plain = nn.Parameter(start.clone())
    last = nn.Parameter(start.clone(memory_format=torch.channels_last))
    empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))
    for ps in ([plain], [last, empty]):
        option = {"beta": 1.0} if name == "esam" else {}
        opt = member(name, torch.optim.SGD(ps, lr=0.01, momentum=0.9), rho=0.3, **option)
        for _ in range(3):
            make_step(
                opt,
                lambda ps=ps, opt=opt: opt.select(
                    (ps[0] ** 4).sum((1, 2, 3)) + sum(p.sum() for p in ps[1:])
                ),
            )
    assert gap([last], [plain]) < 1e-12
    assert last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [wsam.SAM, wsam.ASAM, wsam.FisherSAM])
@pytest.mark.parametrize("gradient", [[1e-4, 1e-4, 0.0], [3e-7, 1e-6, 0.0], [300.0, 1.0, -1e4]])
def test_perturbations_in_half_precision(kind, dtype, gradient) -> None:
    """The scale rho / norm, squares and products leave the range of float16."""

    def moved(precision: torch.dtype) -> Tensor:
        p = nn.Parameter(torch.full((3,), 0.01, dtype=precision))
        p.grad = torch.tensor(gradient, dtype=dtype).to(precision)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wsam.WsamWarning)
            opt = kind(torch.optim.SGD([p], lr=0.1), rho=2.0)
        with opt.perturbed():
            return p.detach().float().clone()

    assert torch.allclose(moved(dtype), moved(torch.float32), rtol=1e-2, atol=1e-3)


def test_clipping_in_half_precision() -> None:
    """Sharpness weighed by 99 leaves the range of float16; the step is clipped, not lost."""

    def stepped(dtype: torch.dtype) -> float:
        p = nn.Parameter(torch.ones((), dtype=dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wsam.WsamWarning)
            opt = wsam.WSAM(torch.optim.SGD([p], lr=0.1), gamma=0.99, max_norm=1.0)
        p.grad = torch.full((), 10.0, dtype=dtype)
        opt.ascend()
        p.grad = torch.full((), 1000.0, dtype=dtype)
        opt.descend()
        opt.step()
        return p.item()

    assert stepped(torch.float16) == pytest.approx(stepped(torch.float32), abs=1e-3)
