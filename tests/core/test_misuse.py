"""What people do by mistake is refused with words that help, or does no harm."""

import contextlib
import copy
import gc
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import wsam
from wsam.schedule import NormAbove

RECIPES = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(32, 8).double(), torch.randint(0, 3, (32,))) for _ in range(4)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def recipe(title: str) -> str:
    """Return the code of a section of the recipes, as it stands there."""
    section = RECIPES.split(f"## {title}\n")[1].split("\n## ")[0]
    return "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))


@pytest.mark.parametrize("title", ["By hand", "float16 with GradScaler"])
@pytest.mark.parametrize("name", ["sam", "wsam", "coupled_wsam", "gsam", "asam", "fisher_sam"])
def test_recipe_equals_the_closure(name: str, title: str) -> None:
    models = [network(), network()]
    opts = [wsam.create(name, sgd(model)) for model in models]
    names = {"torch": torch, "cross_entropy": cross_entropy, "batches": batches()}
    exec(recipe(title), {**names, "model": models[0], "optimizer": opts[0]})
    for x, y in batches():

        def closure(x=x, y=y):
            loss = cross_entropy(models[1](x), y)
            loss.backward()
            return loss

        opts[1].step(closure)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_ascend_must_know_the_scale() -> None:
    model = network()
    opt, scaler = wsam.WSAM(sgd(model)), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = copy.deepcopy(model.state_dict())
    (x, y), *_ = batches()
    opt.begin()
    scaler.scale(cross_entropy(model(x), y)).backward()
    opt.ascend()
    scaler.scale(cross_entropy(model(x), y)).backward()
    scaler.unscale_(opt)
    opt.descend()
    with pytest.raises(RuntimeError, match=r"ascend\(scaler.get_scale\(\)\)"):
        scaler.step(opt)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_replaced_parameters_are_followed() -> None:
    model, other, twin = network(), network(), network()
    opt, plain = wsam.WSAM(sgd(model)), wsam.WSAM(sgd(twin))
    opt.param_groups[0]["params"] = list(other.parameters())
    (x, y), *_ = batches()
    for optimizer, net in ((opt, other), (plain, twin)):

        def closure(net=net):
            loss = cross_entropy(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert all(
        torch.equal(p, q) for p, q in zip(other.parameters(), twin.parameters(), strict=True)
    )


def test_no_gradients_are_refused() -> None:
    model = network()
    opt = wsam.WSAM(sgd(model))
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        opt.step(lambda: torch.zeros(()))
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        opt.ascend()


def test_one_only_looks_inside_perturbed() -> None:
    model = network()
    opt = wsam.WSAM(sgd(model))
    before = copy.deepcopy(model.state_dict())
    (x, y), *_ = batches()
    cross_entropy(model(x), y).backward()
    with opt.perturbed():
        for call in (opt.descend, opt.step):
            with pytest.raises(RuntimeError, match=r"inside perturbed\(\)"):
                call()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_clipping_half_of_the_update_is_refused() -> None:
    model = network()
    opt = wsam.WSAM(sgd(model))
    (x, y), *_ = batches()
    cross_entropy(model(x), y).backward()
    opt.ascend()
    cross_entropy(model(x), y).backward()
    opt.descend()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match="max_norm"):
        opt.step()


@pytest.mark.parametrize("key", ["sam_rhoo", "eta", "beta", "alpha"])
def test_keys_no_group_can_set_are_refused(key: str) -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    base = torch.optim.SGD([{"params": weights, key: 0.1}], lr=0.1)
    with pytest.raises(ValueError, match="groups of this method may set rho, gamma"):
        wsam.WSAM(base)


@pytest.mark.parametrize(
    ("name", "hyper", "message"),
    [
        ("wsam", {"rho": torch.tensor(-1.0)}, "rho must be in"),
        ("wsam", {"gamma": torch.tensor(1.0)}, "gamma must be in"),
        ("esam", {"gamma": 0.0}, "gamma must be in"),
        ("gsam", {"rho": 0.05, "rho_min": 0.1}, "rho_min must be in"),
        ("gsam", {"rho_min": 0.01, "lr_min": 1.0}, "lr_min must be in"),
        ("gsam", {"rho_min": "x"}, "rho_min must be a number"),
        ("gsam", {"lr_min": 0.01}, "pass rho_min"),
        ("asam", {"geometry": wsam.Fisher()}, "unexpected keyword argument 'geometry'"),
        ("sam", {"gamma": 0.9}, "unexpected keyword argument 'gamma'"),
    ],
)
def test_messages_name_what_was_given(name: str, hyper: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        wsam.create(name, sgd(network()), **hyper)


def test_states_that_are_none_are_refused() -> None:
    opt = wsam.WSAM(sgd(network()))
    good = opt.state_dict()
    for bad in ({**good, "sharpness": {}}, {**good, "param_groups": 5}, {}, None):
        with pytest.raises((ValueError, TypeError), match="state_dict"):
            opt.load_state_dict(bad)
    wrong = copy.deepcopy(good)
    wrong["param_groups"][0]["sam_rho"] = -3.0
    with pytest.raises(ValueError, match="rho must be in"):
        opt.load_state_dict(wrong)
    assert opt.param_groups[0]["sam_rho"] == 0.05


def test_a_hyperparameter_of_a_new_rule_may_differ_by_group() -> None:
    from dataclasses import dataclass

    from wsam.rule import NOTHING, Mix, Part, Rule

    @dataclass(frozen=True)
    class Mixed(Rule):
        mixing: float = 0.5

        def mix(self, hyper, products):
            return Mix(Part(1.0, hyper["mixing"]), NOTHING)

    model = network()
    groups = [{"params": model[0].parameters(), "mixing": 0.1}, {"params": model[2].parameters()}]
    opt = wsam.SharpnessAware(torch.optim.SGD(groups, lr=0.1), rule=Mixed())
    assert [group["sam_mixing"] for group in opt.param_groups] == [0.1, 0.5]


def test_warnings_point_at_the_user() -> None:
    weights = [nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    with pytest.warns(wsam.WsamWarning, match="bfloat16") as record:
        wsam.SAM(torch.optim.SGD(weights, lr=0.1))
    assert record[0].filename == __file__


def test_the_norm_of_a_micro_batch_decides_for_no_other() -> None:
    opt = wsam.SAM(sgd(network()), when=NormAbove())
    with pytest.raises(ValueError, match="a single closure"):
        opt.step([lambda: torch.zeros(()), lambda: torch.zeros(())])


@pytest.mark.parametrize("name", ["rho", "gamma"])
def test_plain_names_written_into_a_group_later_are_refused(name: str) -> None:
    """They are read when the optimizer is made; later the value lives under another name."""
    model = nn.Linear(2, 1)
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    opt.param_groups[0][name] = 0.2
    with pytest.raises(ValueError, match=f"set group\\['sam_{name}'\\]"):
        opt.step(lambda: backward(model))
    del opt.param_groups[0][name]
    opt.step(lambda: backward(model))


def test_a_base_may_have_a_rho_of_its_own() -> None:
    model = nn.Linear(2, 1)
    opt = wsam.SAM(torch.optim.Adadelta(model.parameters(), rho=0.8), rho=0.1)
    opt.param_groups[0]["rho"] = 0.7
    opt.step(lambda: backward(model))
    assert opt.param_groups[0]["sam_rho"] == 0.1


def backward(model: nn.Module) -> torch.Tensor:
    loss = model(torch.ones(3, 2)).square().mean()
    loss.backward()
    return loss


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(4, next(model.parameters()).shape[1])).square().mean()


@pytest.mark.parametrize("name", wsam.METHODS)
def test_a_second_pass_without_backward_is_refused(name: str) -> None:
    """Else some members would never train, and others would be their base, without a word."""
    model = nn.Linear(3, 1)
    opt = wsam.create(name, sgd(model), **({"gamma": 1.0} if name == "esam" else {}))
    before = copy.deepcopy(model.state_dict())
    opt.begin()
    loss_of(model).backward()
    opt.ascend()
    with pytest.raises(RuntimeError, match="second pass"):
        opt.descend()
    passes: list[Tensor] = []

    def forgetful() -> Tensor:
        passes.append(loss_of(model))
        if len(passes) == 1:
            passes[0].backward()
        return passes[-1]

    with pytest.raises(RuntimeError, match="second pass"):
        opt.step(forgetful)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("lean", [False, True])
def test_a_step_by_hand_can_be_given_up(lean: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.5, lean=lean)
    opt.abandon()  # nothing is under way
    opt.begin()
    loss_of(model).backward()
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    opt.ascend()
    loss_of(model)
    with pytest.warns(wsam.WsamWarning, match="stepped") if lean else contextlib.nullcontext():
        opt.abandon()
    for key, value in model.state_dict().items():
        if not lean or key not in dict(model.named_parameters()):
            assert torch.equal(before[key], value), key
    assert torch.equal(torch.get_rng_state(), drawn)
    opt.state_dict()
    loss_of(model).backward()
    with opt.perturbed(), pytest.raises(RuntimeError, match="inside perturbed"):
        opt.abandon()

    def closure() -> Tensor:
        opt.abandon()
        return loss_of(model)

    with pytest.raises(RuntimeError, match="inside a closure"):
        opt.step(closure)


def test_a_step_that_is_forgotten_leaves_no_hook() -> None:
    """Without model= a hook on all modules is live between the passes."""
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    model, before = nn.Linear(3, 1), len(hooks)
    for _ in range(2):
        opt = wsam.WSAM(sgd(model))
        opt.begin()
        loss_of(model).backward()
        opt.ascend()
        assert len(hooks) == before + 1
        del opt
        gc.collect()
        assert len(hooks) == before


def test_a_state_of_another_rule_is_told() -> None:
    model = nn.Linear(3, 1)
    state = wsam.CoupledWSAM(sgd(model), gamma=0.5).state_dict()
    with pytest.warns(wsam.WsamWarning, match="rule Coupled, this optimizer has Weighted"):
        wsam.WSAM(sgd(model)).load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wsam.CoupledWSAM(sgd(model)).load_state_dict(state)
        del state["sharpness"]["rule"]  # as it was saved by earlier versions
        wsam.WSAM(sgd(model)).load_state_dict(state)


def test_what_it_looks_like() -> None:
    base = sgd(nn.Linear(3, 1))
    text = repr(wsam.ASAM(base, rho=wsam.schedule.Warmup(1.0, steps=5), max_norm=2.0))
    assert text.startswith("ASAM(rho=Warmup(level=1.0, steps=5, start=0.0), geometry=Adaptive(eta")
    assert "max_norm=2.0" in text
    assert "lean" not in text
