"""Closures that set `p.grad` by themselves, with tensors that `backward` would never leave there."""

from collections.abc import Callable
from typing import Any

import emulated
import pytest
import torch
from helpers import MEMBERS, member
from torch import Tensor, nn

import wsam
from wsam.schedule import Every
from wsam.update import own_gradients

OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_norm": 0.001},
    {"nonfinite": "skip"},
    {"when": Every(2), "max_norm": 0.001},
]
CASES = [(name, options) for name in MEMBERS for options in OPTIONS]
CASES += [("wsam", {"lean": True}), ("sam", {"geometry": wsam.Adaptive()})]


class Sharing:
    """A, B and c: A and B, in two groups, get one gradient, c an expanded one."""

    def __init__(self, name: str, share: bool, kernels: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))
        self.c, self.x = nn.Parameter(torch.randn(3)), torch.randn(5, 3, 4)
        self.own: Callable[[Tensor], Tensor] = (lambda g: g) if share else Tensor.clone
        groups = [{"params": [self.a]}, {"params": [self.b, self.c]}]
        base = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.opt = member(name, base, rho=0.5, **options)
        if kernels:
            emulated.attach(self.opt)

    def weights(self) -> list[Tensor]:
        return [self.a, self.b, self.c]

    def closure(self) -> Tensor:
        both = (self.a + self.b) * 1.0  # whose backward makes a tensor, no view
        losses = (both * self.x).tanh().square().mean((1, 2))
        loss = self.opt.select(losses) + self.c.sum()
        gradients = torch.autograd.grad(loss, self.weights())
        assert gradients[0].data_ptr() == gradients[1].data_ptr()
        assert gradients[2].stride() == (0,)
        assert not gradients[0]._is_view(), "else it would be copied anyway"
        for p, g in zip(self.weights(), gradients, strict=True):
            p.grad = self.own(g)
        return loss


def both(name: str, kernels: bool, **options: Any) -> list[Sharing]:
    return [Sharing(name, share, kernels, **options) for share in (True, False)]


def assert_same(one: Sharing, other: Sharing) -> None:
    torch.testing.assert_close(one.weights(), other.weights(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_gradients_that_share_memory(
    name: str, options: dict[str, Any], kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated.install(monkeypatch)
    pair = both(name, kernels, **options)
    for one in pair:
        for _ in range(3):
            one.opt.step(one.closure)
    assert_same(*pair)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", MEMBERS)
def test_of_micro_batches(name: str, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated.install(monkeypatch)
    pair = both(name, kernels)
    for one in pair:
        for _ in range(3):
            one.opt.step([one.closure, one.closure, one.closure])
    assert_same(*pair)


def test_of_a_step_left_to_the_base_by_hand() -> None:
    """There the base is fed the second pass's gradients, which are clipped."""
    pair = both("sam", kernels=False, when=Every(2), max_norm=0.001)
    for one in pair:
        for _ in range(4):
            one.opt.begin()
            one.closure()
            one.opt.ascend(1.0)
            one.closure()
            one.opt.descend()
            one.opt.step()
    assert_same(*pair)


@pytest.mark.parametrize("share", [True, False])
def test_where_one_is_missing_in_the_second_pass(share: bool) -> None:
    """g1 counts as g0 there, and the others are not mixed up."""
    found = []
    for own in (share, False):
        one, calls = Sharing("wsam", own, kernels=False), 0

        def closure(one: Sharing = one) -> Tensor:
            nonlocal calls
            loss = one.closure()
            calls += 1
            if calls % 2 == 0:
                one.c.grad = None
            return loss

        for _ in range(3):
            one.opt.step(closure)
        found.append(one)
    assert_same(*found)


@pytest.mark.parametrize("name", ["wsam", "gsam", "sam"])
def test_an_empty_weight_keeps_nobody_from_kernels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, own = emulated.install(monkeypatch), emulated.memory
    monkeypatch.setattr(emulated, "memory", lambda at, n: own(at, n) if n else torch.empty(0))
    weights = [nn.Parameter(torch.ones(8)), nn.Parameter(torch.empty(0))]
    opt = member(name, torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    emulated.attach(opt)

    def closure() -> Tensor:
        loss = opt.select(sum((p**2).sum() for p in weights).expand(3))  # type: ignore[union-attr]
        loss.backward()
        return loss

    for _ in range(5):
        opt.step(closure)
    assert device.finish.launches == 4, "all but the first, which makes the momentum"


@pytest.mark.parametrize("fused", [False, True])
def test_the_first_pass_is_not_to_be_overwritten(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that is filled anew in each pass would make g1 - g0 vanish."""
    p = nn.Parameter(torch.ones(4))
    buffer = torch.zeros(4)
    opts = {name: member(name, torch.optim.SGD([p], lr=0.1)) for name in ("wsam", "sam")}
    if fused:
        emulated.install(monkeypatch)
        for opt in opts.values():
            emulated.attach(opt)

    def closure() -> Tensor:
        loss = (p**3).sum()
        p.grad = buffer.copy_(torch.autograd.grad(loss, p)[0])
        return loss.detach()

    with pytest.raises(RuntimeError, match="new tensors in each pass"):
        opts["wsam"].step(closure)
    assert torch.equal(p, torch.ones(4))
    opts["sam"].step(closure)  # which does not keep them


def test_an_overflow_is_seen_where_no_tensor_was_chosen() -> None:
    """The scaler looks at the second pass alone."""
    seed = next(s for s in range(99) if not any(wsam.Masked(0.5, s).mask(0, 2)))
    p, q = (nn.Parameter(torch.ones(4)) for _ in range(2))
    base = torch.optim.SGD([p, q], lr=0.1)
    opt = wsam.WSAM(base, gamma=0.5, geometry=wsam.Masked(0.5, seed))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    opt.begin()
    scaler.scale((p * q).sum()).backward()
    assert p.grad is not None
    p.grad[0] = torch.inf
    opt.ascend(scaler.get_scale())
    scaler.scale((p * q).sum()).backward()
    scaler.unscale_(opt)
    opt.descend()
    scaler.step(opt)
    scaler.update()
    assert torch.equal(p, torch.ones(4))
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("backwards", [False, True])
def test_two_optimizers_in_one_loop_draw_new_masks(backwards: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    masks: list[Tensor] = []
    model[1].register_forward_hook(lambda module, given, out: masks.append(out == 0))
    sides = [[p for p in model.parameters() if (p.dim() == 2) is side] for side in (True, False)]
    opts = [wsam.SAM(torch.optim.SGD(side, lr=0.01)) for side in sides]
    for _ in range(4):
        for opt in opts:
            opt.begin()
        model(torch.ones(4, 8)).square().mean().backward()
        for opt in opts:
            opt.ascend()
        model(torch.ones(4, 8)).square().mean().backward()
        for opt in reversed(opts) if backwards else opts:
            opt.descend()
        for opt in opts:
            opt.step()
    firsts, seconds = masks[::2], masks[1::2]
    assert all(map(torch.equal, firsts, seconds)), "both passes of a step draw the same"
    assert not any(torch.equal(firsts[0], later) for later in firsts[1:])


@pytest.mark.parametrize(
    "view", [torch.zeros(4).view(2, 2), torch.zeros(8)[:4].detach()], ids=["of all", "of a part"]
)
def test_gradients_that_are_views_are_copied(view: Tensor) -> None:
    """Whoever owns the whole writes there again, as DistributedDataParallel does into its buckets."""
    whole = torch.zeros(3)
    kept = own_gradients([whole, view], sharded=False)
    assert kept[0] is whole
    assert kept[1].data_ptr() != view.data_ptr()
