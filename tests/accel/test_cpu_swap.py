"""On a CPU the second pass uses a separate copy of the weights, where nothing else can notice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wsam

pytestmark = pytest.mark.skipif(torch.__version__ < "2.8", reason="torch counts no references")
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Loop:
    """A model, and the addresses of its weights in each pass."""

    def __init__(self, method: str = "wsam", dtype: torch.dtype = torch.float32, **options: Any):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(dtype)
        self.params = list(self.model.parameters())
        base = torch.optim.SGD(self.params, lr=0.1, momentum=0.9)
        self.opt = wsam.create(method, base, model=self.model, **options)
        self.passes: list[list[int]] = []
        self.in_pass: Callable[[], None] = lambda: None

    def addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.params]

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.params]

    def closure(self) -> Tensor:
        self.passes.append(self.addresses())
        self.in_pass()
        losses = self.model(X.to(self.params[0].dtype)).square().mean(1)
        loss = self.opt.select(losses)
        loss.backward()
        return loss

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.opt.step(self.closure)

    @property
    def has_swapped(self) -> bool:
        """Whether the last step used another address in its second pass."""
        return self.passes[-1] != self.passes[-2]


def test_the_second_pass_uses_other_storage() -> None:
    loop = Loop()
    at = loop.addresses()
    loop.train(3)
    first, second = loop.passes[::2], loop.passes[1::2]
    assert first == [at] * 3
    assert loop.addresses() == at
    assert second == [second[0]] * 3, "the buffers are reused"
    assert not set(second[0]) & set(at)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        *((method, torch.float32) for method in ("sam", "wsam", "gsam", "esam", "asam")),
        ("wsam", torch.float64),
    ],
)
def test_swapping_gives_the_same_bits_as_copying(
    method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for swap in (True, False):
        loop = Loop(method, dtype)
        with monkeypatch.context() as patched:
            if not swap:
                patched.setattr("wsam.accel.cpu.can_swap", lambda block, direction: False)
            loop.train(4)
        assert (loop.passes[0] != loop.passes[1]) is swap
        found.append(loop.values())
    assert all(map(torch.equal, *found))


# What else references a weight's storage ------------------------------------------------------------

ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda p: p.detach(),
    "view": lambda p: p.detach().view(-1),
    "numpy": lambda p: p.detach().numpy(),
    "parameter": lambda p: nn.Parameter(p.detach()),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_an_alias_shows_the_weights_that_the_model_uses(kind: str) -> None:
    loop = Loop()
    aliases = [ALIASES[kind](loop.params[0])]
    differences = []

    def compare() -> None:
        seen = torch.as_tensor(aliases[0]).detach().reshape(-1)
        differences.append(float((seen - loop.params[0].detach().reshape(-1)).abs().max()))

    loop.in_pass = compare
    loop.train(2)
    assert not loop.has_swapped
    assert differences == [0.0] * 4
    aliases.clear()
    loop.in_pass = lambda: None
    loop.train(1)
    assert loop.has_swapped is (kind != "numpy"), "torch does not notice when an array is freed"


NOT_COUNTED: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "shared": lambda p: p.detach().clone().share_memory_(),
}


@pytest.mark.parametrize("kind", NOT_COUNTED)
def test_storage_with_unknown_references_is_not_swapped(kind: str) -> None:
    loop = Loop()
    loop.params[0].data = NOT_COUNTED[kind](loop.params[0])
    loop.train(2)
    assert not loop.has_swapped


@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
def test_half_precision_is_not_swapped() -> None:
    loop = Loop(dtype=torch.bfloat16)
    loop.train(1)
    assert not loop.has_swapped


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_duplicate_parameter_is_not_swapped() -> None:
    """It moves twice, as without a backend. torch only warns about duplicates."""
    found = []
    for swap in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        params = list(model.parameters())
        opt = wsam.SAM(torch.optim.SGD([params[0], *params], lr=0.1))
        if not swap:
            opt._backend = None

        def closure(model: nn.Linear = model) -> Tensor:
            loss = model(X).square().mean()
            loss.backward()
            return loss

        opt.step(closure)
        found.append([p.detach() for p in params])
    assert all(map(torch.equal, *found))


# Restoring ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_weights_are_restored_after_an_error(error: type[BaseException]) -> None:
    loop = Loop()
    at, before = loop.addresses(), loop.values()

    def fail() -> None:
        if loop.addresses() != at:
            raise error

    loop.in_pass = fail
    with pytest.raises(error):
        loop.train(1)
    assert loop.addresses() == at
    assert all(map(torch.equal, before, loop.params))


def test_a_step_by_hand() -> None:
    loop = Loop()
    at, opt = loop.addresses(), loop.opt
    opt.begin()
    loop.closure()
    with opt.perturbed():
        assert not all(map(torch.equal, loop.values(), Loop().params))
    assert loop.addresses() == at
    opt.ascend()
    assert loop.addresses() != at
    loop.closure()
    opt.descend()
    assert loop.addresses() == at
    opt.step()
    assert loop.addresses() == at


def test_autograd_notices_the_swap() -> None:
    """A graph of the first pass must not use the weights of the second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    kept: list[Tensor] = []

    def closure() -> Tensor:
        loss = model(X).square().mean()
        loss.backward(retain_graph=True)
        kept.append(loss)
        if len(kept) == 2:
            kept[0].backward()
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        opt.step(closure)


@pytest.mark.parametrize("swap", [True, False])
def test_a_weight_that_uses_the_buffer(swap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If user code makes a buffer the weight, the next step allocates another buffer."""
    loop = Loop(rho=0.5)
    opt, params = loop.opt, loop.params
    for group in opt.param_groups:
        group["lr"] = 0.0
    loop.closure()
    opt.ascend()
    kept = [p.data for p in params]
    opt.abandon()
    for p, moved in zip(params, kept, strict=True):
        p.data = moved
    del kept, moved
    wanted = loop.values()
    if not swap:
        monkeypatch.setattr("wsam.accel.cpu.can_swap", lambda block, direction: False)
    loop.train(3)
    assert all(map(torch.equal, wanted, params))


def test_a_weight_that_gets_other_storage_in_the_second_pass_keeps_it() -> None:
    loop = Loop()
    at, before = loop.addresses(), loop.values()
    flat = torch.zeros(loop.params[0].numel())
    for group in loop.opt.param_groups:
        group["lr"] = 0.0

    def move() -> None:
        p = loop.params[0]
        if p.data_ptr() not in (at[0], flat.data_ptr()):
            flat.copy_(p.detach().view(-1))
            p.data = flat.view_as(p)

    loop.in_pass = move
    loop.train(1)
    assert loop.addresses() == [flat.data_ptr(), *at[1:]]
    assert all(map(torch.equal, before, loop.params))


def test_perturbed_in_inference_mode_before_a_step() -> None:
    loop = Loop()
    loop.closure()
    with torch.inference_mode(), loop.opt.perturbed():
        pass
    loop.train(1)
