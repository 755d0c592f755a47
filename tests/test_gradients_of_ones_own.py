"""Closures that set `p.grad` by themselves, with tensors that `backward` would never leave there."""

from collections.abc import Callable
from typing import Any

import emulated
import pytest
import torch
from helpers import MEMBERS, member
from torch import Tensor, nn

import wsam

OPTIONS: list[dict[str, Any]] = [{}, {"max_norm": 0.001}, {"nonfinite": "skip"}]
CASES = [(name, options) for name in MEMBERS for options in OPTIONS]
CASES += [("wsam", {"lean": True}), ("sam", {"geometry": wsam.Adaptive()})]


def trained(
    name: str, options: dict[str, Any], own: Callable[[Tensor], Tensor], micro: bool = False
) -> list[Tensor]:
    """Train A, B and c, of which A and B get one gradient and c an expanded one."""
    torch.manual_seed(0)
    a, b = (nn.Parameter(torch.randn(3, 4, dtype=torch.float64)) for _ in range(2))
    c = nn.Parameter(torch.randn(3, dtype=torch.float64))
    x = torch.randn(5, 4, dtype=torch.float64)
    groups = [{"params": [a, c]}, {"params": [b]}]
    opt = member(name, torch.optim.SGD(groups, lr=0.1, momentum=0.9), rho=0.5, **options)

    def closure() -> Tensor:
        losses = torch.tanh(x @ (a + b).T).square().mean(1)
        loss = opt.select(losses) + c.sum()
        gradients = torch.autograd.grad(loss, [a, b, c])
        assert gradients[0].data_ptr() == gradients[1].data_ptr()
        assert gradients[2].stride() == (0,)
        for p, g in zip((a, b, c), gradients, strict=True):
            p.grad = own(g)
        return loss

    for _ in range(3):
        opt.step([closure, closure] if micro else closure)
    return [p.detach() for p in (a, b, c)]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_gradients_that_share_memory(name: str, options: dict[str, Any]) -> None:
    shared = trained(name, options, own=lambda g: g)
    torch.testing.assert_close(shared, trained(name, options, own=Tensor.clone), rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in ("gsam", "esam")])
def test_of_micro_batches(name: str) -> None:
    shared = trained(name, {}, own=lambda g: g, micro=True)
    wanted = trained(name, {}, own=Tensor.clone, micro=True)
    torch.testing.assert_close(shared, wanted, rtol=0, atol=1e-15)


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
