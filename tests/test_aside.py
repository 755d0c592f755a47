"""On a CPU w + d lies elsewhere during the second pass, if nobody would see that but the model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wsam
from wsam import aside

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Watched:
    """A model, and where its weights lie in each pass."""

    def __init__(self, name: str = "wsam", dtype: torch.dtype = torch.float32, **options: Any):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(dtype)
        self.params = list(self.model.parameters())
        base = torch.optim.SGD(self.params, lr=0.1, momentum=0.9)
        self.opt = wsam.create(name, base, model=self.model, **options)
        self.places: list[list[int]] = []
        self.seen: Callable[[], None] = lambda: None

    def where(self) -> list[int]:
        return [p.data_ptr() for p in self.params]

    def closure(self) -> Tensor:
        self.places.append(self.where())
        self.seen()
        losses = self.model(X.to(self.params[0].dtype)).square().mean(1)
        loss = self.opt.select(losses)
        loss.backward()
        return loss


def test_the_second_pass_runs_elsewhere() -> None:
    watched = Watched()
    at = watched.where()
    for _ in range(3):
        watched.opt.step(watched.closure)
    first, second = watched.places[::2], watched.places[1::2]
    assert first == [at] * 3
    assert watched.where() == at
    assert second == [second[0]] * 3, "the same memory at each step"
    assert not set(second[0]) & set(at)


@pytest.mark.parametrize("name", wsam.METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_bits(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for told in (True, False):
        watched = Watched(name, dtype)
        with monkeypatch.context() as patched:
            if not told:
                patched.setattr(aside, "_names", lambda tensor: 0)
            for _ in range(5):
                watched.opt.step(watched.closure)
        apart = watched.places[0] != watched.places[1]
        assert apart == told
        found.append([p.detach().clone() for p in watched.params])
    assert all(map(torch.equal, *found))


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "view": lambda p: p.detach().view(-1),
    "numpy": lambda p: p.detach().numpy(),
    "parameter": lambda p: nn.Parameter(p.detach()),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_another_name_of_a_weight_shows_what_the_model_sees(kind: str) -> None:
    watched = Watched()
    aliases = [ALIASES[kind](watched.params[0])]
    differences = []

    def compare() -> None:
        seen = torch.as_tensor(aliases[0]).detach().reshape(-1)
        differences.append(float((seen - watched.params[0].detach().reshape(-1)).abs().max()))

    watched.seen = compare
    for _ in range(2):
        watched.opt.step(watched.closure)
    assert watched.places[0] == watched.places[1], "copied and put back"
    assert differences == [0.0] * 4
    aliases.clear()
    watched.seen = lambda: None
    watched.opt.step(watched.closure)
    assert watched.places[-1] != watched.places[-2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore::wsam.WsamWarning")
def test_half_precision_is_copied(dtype: torch.dtype) -> None:
    watched = Watched(dtype=dtype)
    watched.opt.step(watched.closure)
    assert watched.places[0] == watched.places[1]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_happens_there(error: type[BaseException]) -> None:
    watched = Watched()
    at, before = watched.where(), [p.detach().clone() for p in watched.params]

    def fail() -> None:
        if watched.where() != at:
            raise error

    watched.seen = fail
    with pytest.raises(error):
        watched.opt.step(watched.closure)
    assert watched.where() == at
    assert all(map(torch.equal, before, watched.params))


def test_by_hand_and_to_look() -> None:
    watched = Watched()
    at, opt = watched.where(), watched.opt
    opt.begin()
    watched.closure()
    with opt.perturbed():
        assert watched.where() != at
    assert watched.where() == at
    opt.ascend()
    assert watched.where() != at
    watched.closure()
    opt.descend()
    assert watched.where() == at
    opt.step()
    assert watched.where() == at


def test_a_graph_of_the_first_pass_does_not_take_the_weights_of_the_second_for_its_own() -> None:
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


def test_a_torch_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    aside._names_of_one.cache_clear()
    try:
        watched = Watched()
        watched.opt.step(watched.closure)
        assert watched.places[0] == watched.places[1]
    finally:
        monkeypatch.undo()
        aside._names_of_one.cache_clear()
