"""Promises about the model between the passes: statistics, masks, losses, hooks, precision."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    MEMBERS,
    STYLES,
    closure,
    make_step,
    member,
    model_loss,
    same,
)
from torch import Tensor, nn

import wsam

GIVEN = pytest.mark.parametrize("given", [True, False], ids=["model", "no-model"])

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
    """A trained scale in front of a normalisation layer, so that w + d changes what it sees."""

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


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


@GIVEN
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("name", MEMBERS)
def test_bn_one_update(name: str, kind: str, style: str, given: bool) -> None:
    """Each step leaves the statistics where its first pass alone would have left them."""
    model, data = normed(kind)
    options = {"model": model} if given else {}
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.01), rho=1.0, **options)
    for t in range(3):
        twin = copy.deepcopy(model)
        twin(data(t))
        make_step(opt, lambda t=t: opt.select(model(data(t))), style)
        assert same(statistics(model), statistics(twin))
    if kind != "untracked":
        counts = not kind.startswith("instance")  # torch's InstanceNorm counts no batches
        assert int(model.norm.num_batches_tracked) == (3 if counts else 0)
        assert not torch.equal(model.norm.running_mean, torch.zeros(4))


@GIVEN
@pytest.mark.parametrize("lean", [False, True])
def test_bn_one_update_in_the_lean_plan(lean: bool, given: bool) -> None:
    model, data = normed("2d")
    options = {"model": model} if given else {}
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.01), rho=1.0, lean=lean, **options)
    for t in range(3):
        twin = copy.deepcopy(model)
        twin(data(t))
        make_step(opt, lambda t=t: opt.select(model(data(t))))
        assert same(statistics(model), statistics(twin))


@GIVEN
@pytest.mark.parametrize("fail_in", [1, 2])
@pytest.mark.parametrize("kind", ["1d", "cumulative", "instance"])
@pytest.mark.parametrize("name", MEMBERS)
def test_bn_one_update_after_an_error(name: str, kind: str, fail_in: int, given: bool) -> None:
    """An error in either pass leaves at most the first pass in the statistics; the next step works."""
    model, data = normed(kind)
    options = {"model": model} if given else {}
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.01), rho=1.0, **options)
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
    model(data(3))  # outside a step the layers move as ever
    assert not same(statistics(model), statistics(twin))


@GIVEN
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("why", ["interval", "radius", "skip"])
def test_bn_one_update_where_nothing_is_perturbed(why: str, style: str, given: bool) -> None:
    """A loop by hand runs its second pass anyway: it does not count there either."""
    model, data = normed("2d")
    options: dict[str, Any] = {
        "interval": {"when": wsam.schedule.Every(2, offset=1)},
        "radius": {"rho": 0.0},
        "skip": {"nonfinite": "skip"},
    }[why]
    if given:
        options["model"] = model
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.01), **options)
    for t in range(2):
        twin = copy.deepcopy(model)
        twin(data(t))
        factor = torch.nan if why == "skip" else 1.0
        make_step(opt, lambda t=t, f=factor: opt.select(model(data(t))) * f, style)
        assert same(statistics(model), statistics(twin))
        assert int(model.norm.num_batches_tracked) == t + 1


@GIVEN
def test_bn_in_evaluation_mode_is_left_alone(given: bool) -> None:
    model, data = normed("2d")
    model.eval()
    options = {"model": model} if given else {}
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.01), **options)
    before = statistics(model)
    make_step(opt, lambda: opt.select(model(data(0))))
    assert same(statistics(model), before)
    assert not model.training


def test_bn_counts_of_any_size_come_back() -> None:
    """Counts are copied as bits: such as would be no numbers, taken for floats, too."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
    for count in (2**61 + 12345, 0x7F8000017F800001, 0x7FF8000000000001):
        model[1].num_batches_tracked.fill_(count)

        def closure() -> Tensor:
            loss = model(torch.randn(4, 2)).square().mean()
            loss.backward()
            return loss

        opt.step(closure)
        assert int(model[1].num_batches_tracked) == count + 1


@GIVEN
@pytest.mark.parametrize("name", MEMBERS)
def test_perturbed_leaves_the_statistics(name: str, given: bool) -> None:
    model, data = normed("2d")
    options = {"model": model} if given else {}
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.01), rho=1.0, **options)
    opt.select(model(data(0))).backward()
    before = statistics(model)
    with opt.perturbed():
        model(data(1))
    assert same(statistics(model), before)


# --- random masks ------------------------------------------------------------------------------


def with_dropout() -> tuple[nn.Sequential, list[Tensor]]:
    """A model, and a list that receives the dropout mask of each forward pass."""
    torch.manual_seed(0)
    dropout = nn.Dropout(0.5)
    masks: list[Tensor] = []
    dropout.register_forward_hook(lambda m, args, out: masks.append(out.detach() != 0))
    return nn.Sequential(nn.Linear(5, 64), dropout, nn.Linear(64, 2)).double(), masks


@pytest.mark.parametrize("style", ["closure", "phases"])
@pytest.mark.parametrize("name", MEMBERS)
def test_same_mask(name: str, style: str) -> None:
    """Both passes draw the same mask, steps draw new ones, and the generator advances once."""
    model, masks = with_dropout()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.01))
    plain = copy.deepcopy(model)
    torch.manual_seed(5)
    for t in range(3):
        make_step(opt, model_loss(opt, model, t), style)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    for _ in range(3):
        plain(torch.zeros(10, 5, dtype=torch.float64))
    assert torch.equal(after, torch.get_rng_state())
    assert len(masks) == 6 or len(masks) == 9  # the plain copy shares the list or not
    pairs = [(masks[2 * t], masks[2 * t + 1]) for t in range(3)]
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(pairs[0][0], pairs[1][0])


def test_same_mask_is_never_that_of_an_earlier_step() -> None:
    """A step without begin() does not rewind the generator to where some other step began."""
    model, masks = with_dropout()
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.01))
    make_step(opt, model_loss(opt, model, 0), "phases")
    make_step(opt, model_loss(opt, model, 1), "two_step")
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[3], masks[0])


@pytest.mark.parametrize("name", MEMBERS)
def test_same_mask_can_be_left(name: str) -> None:
    model, masks = with_dropout()
    opt = member(name, torch.optim.SGD(model.parameters(), lr=0.01), repeat_randomness=False)
    opt.step(closure(opt, model))
    assert not torch.equal(masks[0], masks[1])


def test_same_mask_after_an_error() -> None:
    """A failing second pass does not leave the generator where the first pass began."""
    model, masks = with_dropout()
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.01))
    calls = 0

    def run() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return closure(opt, model)()

    with pytest.raises(KeyboardInterrupt):
        opt.step(run)
    opt.step(closure(opt, model))
    assert not torch.equal(masks[0], masks[1])


def test_a_look_does_not_disturb_a_step() -> None:
    """`perturbed` may be used between the phases: masks, samples and a prepared update stay."""

    def run(look: bool) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        opt = member("esam", torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, gamma=0.5)
        x = torch.randn(6, 4)

        def glance() -> None:
            if look:
                with opt.perturbed(), torch.random.fork_rng():
                    model(x)

        for _ in range(2):
            opt.begin()
            opt.select(model(x).square().flatten()).backward()
            glance()
            opt.ascend()
            opt.select(model(x).square().flatten()).backward()
            opt.descend()
            glance()
            opt.step()
        return [p.detach() for p in model.parameters()]

    assert same(run(look=True), run(look=False))
