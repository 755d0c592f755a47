"""Base optimizers of torch and other libraries, and the table of those that work.

`python tests/core/test_bases.py` writes the table of `docs/bases.md`. Libraries of 8-bit optimizers
are not among the development requirements, since other libraries import them if they are installed:
install torchao or bitsandbytes to test them.
"""

import copy
import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wsam
from wsam.lab.markdown_tables import update_tables

PAGE = Path(__file__).parents[2] / "docs" / "bases.md"
TORCH, PEER = "torch.optim", "pytorch_optimizer"
FREE, TORCHAO, BNB = "schedulefree", "torchao.optim", "bitsandbytes.optim"
SMALL: dict[str, Any] = {"min_8bit_size": 16}
# library -> {class: arguments}
BASES: dict[str, dict[str, dict[str, Any]]] = {
    TORCH: {
        "SGD": {"lr": 0.1, "momentum": 0.9},
        **{
            name: {"lr": 0.01}
            for name in ("Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adamax")
        },
        "Adadelta": {"lr": 1.0},
        "Adafactor": {"lr": 0.05},
        "ASGD": {"lr": 0.1},
        "Rprop": {"lr": 0.001},
        "Muon": {"lr": 0.02},
    },
    FREE: {
        "AdamWScheduleFree": {"lr": 0.01},
        "RAdamScheduleFree": {"lr": 0.01},
        "SGDScheduleFree": {"lr": 0.3},
    },
    TORCHAO: {name: {"lr": 0.01} for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")},
    BNB: {
        "AdamW8bit": {"lr": 0.01, **SMALL},
        "Lion8bit": {"lr": 0.003, **SMALL},
        "SGD8bit": {"lr": 0.1, "momentum": 0.9, **SMALL},
    },
    PEER: {
        name: {"lr": 0.01}
        for name in (
            *("AdaBelief", "Adan", "AdEMAMix", "ADOPT", "Lamb", "LaProp", "MARS"),
            *("ScheduleFreeAdamW", "SOAP", "StableAdamW", "Yogi"),
        )
    }
    | {"Prodigy": {"lr": 1.0}, "Lion": {"lr": 0.003}, "Muon": {"lr": 0.02}, "SGDP": {"lr": 0.1}},
}
CASES = [(library, name) for library, classes in BASES.items() for name in classes]


class Net(nn.Module):
    """Matrices only, since torch's Muon takes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 128, bias=False)
        self.second = nn.Linear(128, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def make_base(library: str, name: str, model: nn.Module) -> Any:
    kind = getattr(importlib.import_module(library), name)
    params: Any = list(model.parameters())
    if (library, name) == (PEER, "Muon"):
        params = [
            {"params": params[:1], "use_muon": True},
            {"params": params[1:], "use_muon": False},
        ]
    base = kind(params, **BASES[library][name])
    if hasattr(base, "train"):
        base.train()
    return base


def batch(t: int) -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(t))


def step(opt: Any, model: nn.Module, t: int) -> float:
    x = batch(t)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = (model(x) - x[:, :4]).square().mean()
        loss.backward()
        return loss

    if isinstance(opt, wsam.SharpnessAware):
        return float(opt.step(closure))
    loss = closure()
    opt.step()
    return float(loss)


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), CASES)
def test_base(library: str, name: str) -> None:
    """rho = 0 is the base bitwise, SAM and WSAM learn, and a resumed run equals the other."""
    pytest.importorskip(library.partition(".")[0])
    models = Net(), Net()
    plain = make_base(library, name, models[0])
    opt = wsam.SAM(make_base(library, name, models[1]), rho=0.0)
    for t in range(4):
        step(plain, models[0], t)
        step(opt, models[1], t)
    assert all(map(torch.equal, weights(models[0]), weights(models[1])))
    for method in (wsam.SAM, wsam.WSAM):
        model = Net()
        options = {"gamma": 0.5} if method is wsam.WSAM else {}
        opt = method(make_base(library, name, model), rho=0.05, **options)
        losses = [step(opt, model, t) for t in range(30)]
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), method.__name__
    other = Net()
    other.load_state_dict(model.state_dict())
    again = wsam.WSAM(make_base(library, name, other), rho=0.05, gamma=0.5)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for t in range(30, 33):
        step(opt, model, t)
        step(again, other, t)
    assert all(map(torch.equal, weights(model), weights(other)))


def form_of_wsam(library: str, name: str) -> str:
    """Return which form of WSAM the base gets: "preconditioned", or "published"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = wsam.WSAM(make_base(library, name, Net()))
        chosen = opt.rule.precondition
        adaptive = any("eps" in g or "betas" in g for g in opt.param_groups)
    if chosen:
        return "preconditioned"
    return "published; warns" if adaptive else "published"


def table(words: str) -> str:
    rows = ["| library | base | SAM and the others | WSAM |", "|---|---|---|---|"]
    for library in (TORCH, FREE, PEER):
        classes = BASES[library]
        forms: dict[str, list[str]] = {}
        for name in classes:
            forms.setdefault(form_of_wsam(library, name), []).append(name)
        for form, names in forms.items():
            listed = ", ".join(f"`{name}`" for name in names)
            rows.append(f"| {library.partition('.')[0]} | {listed} | yes | {form} |")
    return "\n".join(rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_table_is_up_to_date() -> None:
    for library in (FREE, PEER):
        pytest.importorskip(library)
    changed = update_tables(PAGE, "bases:", table, check=True)
    assert not changed, "run python tests/core/test_bases.py"


if __name__ == "__main__":
    sys.exit(print(f"changed: {update_tables(PAGE, 'bases:', table)}"))
