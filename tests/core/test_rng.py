"""Random numbers: both passes draw the same dropout masks, and the generator advances once a step."""

import copy

import pytest
import torch
from helpers import METHODS, closure, covering, make_method, make_step, model_loss
from torch import Tensor, nn

import wsam
from wsam._core.param_blocks import Block
from wsam._core.rng import RngState


def with_dropout() -> tuple[nn.Sequential, list[Tensor]]:
    """Return a model, and a list that receives the dropout mask of each forward pass."""
    torch.manual_seed(0)
    dropout = nn.Dropout(0.5)
    masks: list[Tensor] = []
    dropout.register_forward_hook(lambda m, args, out: masks.append(out.detach() != 0))
    return nn.Sequential(nn.Linear(5, 64), dropout, nn.Linear(64, 2)).double(), masks


@covering(name=METHODS, style=["closure", "phases"])
def test_same_mask(name: str, style: str) -> None:
    """Steps draw new masks; the generator advances as by one pass a step."""
    model, masks = with_dropout()
    opt = make_method(name, torch.optim.SGD(model.parameters(), lr=0.01))
    plain = copy.deepcopy(model)
    torch.manual_seed(5)
    for t in range(3):
        make_step(opt, model_loss(opt, model, t), style)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    for _ in range(3):
        plain(torch.zeros(10, 5, dtype=torch.float64))
    assert torch.equal(after, torch.get_rng_state())
    assert len(masks) == 6 or len(masks) == 9  # the copy's hook may append to the same list
    pairs = [(masks[2 * t], masks[2 * t + 1]) for t in range(3)]
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(pairs[0][0], pairs[1][0])


def test_same_mask_without_begin() -> None:
    """A step without begin() does not rewind the generator to the start of an earlier step."""
    model, masks = with_dropout()
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.01))
    make_step(opt, model_loss(opt, model, 0), "phases")
    make_step(opt, model_loss(opt, model, 1), "two_step")
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[3], masks[0])


@pytest.mark.parametrize("name", METHODS)
def test_same_mask_opt_out(name: str) -> None:
    model, masks = with_dropout()
    opt = make_method(name, torch.optim.SGD(model.parameters(), lr=0.01), repeat_randomness=False)
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


@pytest.mark.parametrize("reverse", [False, True])
def test_same_mask_with_two_optimizers_in_one_loop(reverse: bool) -> None:
    """Dropout masks repeat in the second pass and differ from step to step."""
    model, masks = with_dropout()
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    opts = [wsam.SAM(torch.optim.SGD(params, lr=0.01)) for params in (weights, biases)]
    x = torch.ones(4, 5, dtype=torch.float64)
    for _ in range(4):
        for opt in opts:
            opt.begin()
        model(x).square().mean().backward()
        for opt in opts:
            opt.ascend()
        model(x).square().mean().backward()
        for opt in reversed(opts) if reverse else opts:
            opt.descend()
        for opt in opts:
            opt.step()
    first_passes, second_passes = masks[::2], masks[1::2]
    assert all(map(torch.equal, first_passes, second_passes))
    assert not any(torch.equal(first_passes[0], later) for later in first_passes[1:])


def test_generators_follow_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model moves to a GPU after the optimizer was made, as `accelerator.prepare` does it."""
    model = nn.Linear(2, 1)
    opt = wsam.SAM(torch.optim.SGD(model.parameters(), lr=0.1))
    gpu = torch.device("xpu", 0)
    monkeypatch.setattr("wsam.optimizer._KIND", lambda p: (p.dtype, gpu))
    monkeypatch.setattr(Block, "device", gpu)
    used = []
    monkeypatch.setattr(RngState, "read", lambda self: used.append(self._devices) or ())
    opt.begin()
    assert used == [[gpu]]


class OneGenerator:
    """Stands for `torch.mps` or `torch.xpu`: a generator, and the arguments it was called with."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.devices: list[tuple[torch.device, ...]] = []

    def get_rng_state(self, *device: torch.device) -> Tensor:
        self.devices.append(device)
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, *device: torch.device) -> None:
        self.devices.append(device)
        self.generator.set_state(state)


@pytest.mark.parametrize(("kind", "arguments"), [("mps", 0), ("xpu", 1)])
def test_generators_of_other_accelerators(
    kind: str, arguments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout on these devices draws from their own default generators."""
    accelerator = OneGenerator()
    monkeypatch.setattr(torch, kind, accelerator)
    states = RngState([torch.device("cpu"), torch.device(kind, 0), torch.device("meta")])
    before = states.read()
    drawn = torch.rand(3, generator=accelerator.generator)
    assert not states.is_at(before)
    states.write(before)
    assert states.is_at(before)
    assert torch.equal(torch.rand(3, generator=accelerator.generator), drawn)
    assert set(accelerator.devices) == {(torch.device(kind, 0),) * arguments}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_same_mask_after_moving_to_a_gpu() -> None:
    model, masks = with_dropout()
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.01))
    model.cuda()
    x = torch.ones(10, 5, dtype=torch.float64, device="cuda")

    def forward_and_backward() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    opt.step(forward_and_backward)
    assert torch.equal(masks[0], masks[1])
