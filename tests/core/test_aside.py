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
                patched.setattr(aside, "ALONE", None)
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
    if kind != "numpy":  # of which torch never forgets that it has been told
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
    assert aside._holders_of_lone_memory() is None
    monkeypatch.setattr(aside, "ALONE", None)
    watched = Watched()
    watched.opt.step(watched.closure)
    assert watched.places[0] == watched.places[1]


UNCOUNTED: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
    "shared": lambda p: p.detach().clone().share_memory_(),
}


@pytest.mark.parametrize("kind", UNCOUNTED)
def test_memory_that_may_have_names_nobody_counts_is_not_left(kind: str) -> None:
    watched = Watched()
    watched.params[0].data = UNCOUNTED[kind](watched.params[0])
    for _ in range(2):
        watched.opt.step(watched.closure)
    assert watched.places[0] == watched.places[1]


def test_a_storage_that_is_held_is_a_name() -> None:
    watched = Watched()
    held = [watched.params[0].untyped_storage()]
    watched.opt.step(watched.closure)
    assert watched.places[0] == watched.places[1]
    held.clear()
    watched.opt.step(watched.closure)
    assert watched.places[-1] != watched.places[-2]


def test_a_weight_twice_in_a_group_moves_twice() -> None:
    """As it does where weights are copied: torch only warns of it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    params = list(model.parameters())
    at = [p.data_ptr() for p in params]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        base = torch.optim.SGD([params[0], *params], lr=0.1)
    opt = wsam.SAM(base)

    def closure() -> Tensor:
        assert [p.data_ptr() for p in params] == at
        loss = model(X).square().mean()
        loss.backward()
        return loss

    opt.step(closure)


@pytest.mark.parametrize("told", [True, False])
def test_weights_that_are_put_where_w_and_d_lay(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever keeps what lay there, and makes weights of it, gets memory of his own."""
    watched = Watched(rho=0.5)
    opt, params = watched.opt, watched.params
    for group in opt.param_groups:
        group["lr"] = 0.0
    watched.closure()
    with opt.perturbed():
        kept = [p.data for p in params]
    for p, moved in zip(params, kept, strict=True):
        p.data = moved
    del kept, moved
    wanted = [p.detach().clone() for p in params]
    if not told:
        monkeypatch.setattr(aside, "ALONE", None)
    for _ in range(3):
        opt.step(watched.closure)
    assert all(map(torch.equal, wanted, params))


def test_weights_that_get_other_memory_in_the_second_pass_keep_it() -> None:
    watched = Watched()
    at, before = watched.where(), [p.detach().clone() for p in watched.params]
    flat = torch.zeros(watched.params[0].numel())
    for group in watched.opt.param_groups:
        group["lr"] = 0.0

    def move() -> None:
        p = watched.params[0]
        if p.data_ptr() not in (at[0], flat.data_ptr()):
            flat.copy_(p.detach().view(-1))
            p.data = flat.view_as(p)

    watched.seen = move
    watched.opt.step(watched.closure)
    assert watched.where() == [flat.data_ptr(), *at[1:]]
    assert all(map(torch.equal, before, watched.params))


def test_a_look_in_inference_mode_comes_first() -> None:
    watched = Watched()
    watched.closure()
    with torch.inference_mode(), watched.opt.perturbed():
        pass
    watched.opt.step(watched.closure)
