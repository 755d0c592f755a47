"""Settings of a run: checks, canonical form, key."""

import dataclasses
import json
import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wsam.lab import settings
from wsam.lab.run import Run

PAPER = Run(
    data="cifar10",
    model="resnet18",
    method="wsam",
    hyper={"rho": 0.2, "gamma": 0.88},
    base_args={"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3},
    epochs=200,
    precision="bf16",
)


@pytest.mark.parametrize("method", [m for m in settings.method_defaults() if m != settings.VANILLA])
def test_accepts_geometry_matches_the_constructor(method, monkeypatch):
    from wsam import methods
    from wsam.geometry import Euclidean

    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    try:
        methods.create(method, opt, geometry=Euclidean())
        accepts = True
    except TypeError:
        accepts = False
    monkeypatch.setattr(methods, "create", None)
    assert settings.accepts(method, "geometry") is accepts
    assert not settings.accepts(settings.VANILLA, "geometry")


@st.composite
def runs(draw):
    method = draw(st.sampled_from(sorted(settings.method_defaults())))
    base = draw(st.sampled_from(sorted(settings.BASES)))
    share = st.floats(0.01, 0.99)
    hyper = {
        n: draw(share)
        for n, v in settings.method_defaults()[method].items()
        if isinstance(v, float)
    }
    geometry = None
    if settings.accepts(method, "geometry"):
        choices = [None, {"name": "adaptive", "eta": 0.5}, {"name": "fisher"}, {"name": "masked"}]
        geometry = draw(st.sampled_from(choices))
    return Run(
        data=draw(st.sampled_from([*settings.DATA, "folder:pets"])),
        model=draw(st.sampled_from([*settings.MODELS, "timm:resnet50"])),
        method=method,
        hyper=hyper,
        geometry=geometry,
        base=base,
        base_args={"lr": draw(share)},
        epochs=draw(st.integers(1, 400)),
        seed=draw(st.integers(0, 5)),
        noise=draw(st.sampled_from([0, 0.2, 0.8])),
        noise_seed=draw(st.integers(0, 3)),
        precision=draw(st.sampled_from(settings.PRECISIONS)),
        train_limit=draw(st.none() | st.integers(1, 100)),
    )


@given(runs())
def test_round_trip_through_json_and_pickle(run):
    again = Run.from_dict(json.loads(json.dumps(run.to_dict())))
    assert again == run
    assert again.key == run.key
    assert pickle.loads(pickle.dumps(run)) == run
    assert hash(again) == hash(run)


@given(runs(), runs())
def test_keys_are_equal_if_and_only_if_runs_are_equal(one, other):
    assert (one.key == other.key) == (one == other)


def test_key_is_pinned():
    # Records in results/ have these names: changing the key would orphan all of them.
    assert PAPER.key == "631076422cab"
    assert len(PAPER.key) == 12
    assert PAPER.title == "cifar10 resnet18 wsam gamma=0.88 rho=0.2 seed=0"


def test_defaults_and_number_types_do_not_change_the_key():
    assert Run(method="sam").key == Run(method="sam", hyper={"rho": 0.05}).key
    assert Run(method="sam", hyper={"rho": 1}).key == Run(method="sam", hyper={"rho": 1.0}).key
    assert Run(noise=0, noise_seed=7).key == Run().key
    assert Run(noise=0.2, noise_seed=7).key != Run(noise=0.2).key
    assert Run(options={"lean": False}).key == Run().key
    assert Run(options={"lean": True}).key != Run().key
    assert Run(options={"every": 1, "reuse": False}).key == Run().key
    assert Run(options={"every": 5}).key != Run().key
    assert Run(options={"precondition": False}).key == Run().key
    assert Run(base="adam", options={"precondition": True}).key != Run(base="adam").key


def test_settings_that_are_off_are_not_in_the_key():
    assert "train_limit" not in PAPER.canonical
    assert "geometry" not in PAPER.canonical
    assert json.loads(PAPER.canonical)["hyper"] == {"gamma": 0.88, "rho": 0.2}


def test_runs_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PAPER.seed = 1
    with pytest.raises(TypeError):
        PAPER.hyper["rho"] = 1.0


def test_replacing_the_method_resets_its_arguments():
    sam = PAPER.replace(method="sam")
    assert dict(sam.hyper) == {"rho": 0.05}
    assert PAPER.replace(base="adamw").base_args["weight_decay"] == 0.01
    assert PAPER.replace(seed=2).hyper == PAPER.hyper
    adaptive = PAPER.replace(geometry={"name": "adaptive"})
    assert adaptive.replace(method="vanilla").geometry is None
    assert adaptive.replace(seed=2).geometry == adaptive.geometry
    assert adaptive.replace(method="sam", geometry=adaptive.geometry).geometry["name"] == "adaptive"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "swam"}, ["swam", "vanilla", "wsam", "fisher_sam"]),
        ({"data": "cifar"}, ["cifar10", "cifar100", "folder:PATH"]),
        ({"model": "resnet"}, ["resnet18", "wrn-28-10", "timm:NAME"]),
        ({"base": "lion"}, ["sgd", "adamw"]),
        ({"schedule": "step"}, ["cosine"]),
        ({"precision": "fp16"}, ["fp32", "bf16"]),
        ({"metric": "f1"}, ["unknown metric 'f1'", "accuracy", "macro-f1", "FILE.py:FUNCTION"]),
        ({"task": "ranking"}, ["unknown task 'ranking'", "classification, regression"]),
        ({"method": "sam", "hyper": {"gamma": 0.9}}, ["sam does not take 'gamma'", "rho"]),
        ({"method": "vanilla", "hyper": {"rho": 0.9}}, ["vanilla", "takes: none"]),
        ({"base_args": {"betas": [0, 1]}}, ["sgd does not take 'betas'", "momentum"]),
        ({"hyper": {"rho": float("nan")}}, ["rho of wsam must be in (-inf, inf)", "nan"]),
        ({"geometry": {"name": "round"}}, ["round", "adaptive", "fisher", "masked"]),
        ({"geometry": {"name": "fisher", "rho": 1}}, ["geometry fisher", "eta"]),
        ({"method": "asam", "geometry": {"name": "fisher"}}, ["asam does not take 'geometry'"]),
        ({"epochs": 0}, ["epochs", "at least 1"]),
        ({"noise": 1.5}, ["noise", "in [0, 1]"]),
        ({"options": {"keep": 0.5}}, ["wsam does not take 'keep'", "lean"]),
        ({"model": "mlp", "model_args": {"width": 0}}, ["width of mlp must be at least 1, got 0"]),
        ({"method": "sam", "options": {"lean": True}}, ["sam does not take 'lean'"]),
        ({"options": {"reuse": True}}, ["reuse needs every, which is off"]),
        ({"options": {"precondition": True}}, ["precondition needs an adaptive base", "not sgd"]),
        ({"options": {"every": 0}}, ["every", "at least 1"]),
    ],
)
def test_invalid_settings_list_the_valid_ones(given, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as raised:
        Run(**given)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hyper": {"rho": "0.1"}}, "rho of wsam must be a number in (-inf, inf), got '0.1'"),
        ({"hyper": {"rho": True}}, "rho of wsam must be a number in (-inf, inf), got True"),
        ({"epochs": 2.0}, "epochs must be a whole number of at least 1, got 2.0"),
        ({"epochs": None}, "epochs must be a whole number of at least 1, got None"),
        ({"augment": 1}, "augment must be True or False, got 1"),
        ({"noise": "0.4"}, "noise must be a number in [0, 1], got '0.4'"),
        ({"noise": True}, "noise must be a number in [0, 1], got True"),
        ({"model": 18}, "model must be a string, got 18"),
        ({"pretrained": True}, "pretrained must be a string, got True"),
        ({"hyper": 0.2}, "hyper must be a mapping"),
        ({"base_args": None}, "base_args must be a mapping"),
        ({"options": ["lean"]}, "options must be a mapping"),
        ({"geometry": "adaptive"}, 'geometry must have a "name", as {"name": "adaptive"}'),
        ({"geometry": {"eta": 1.0}}, 'geometry must have a "name"'),
        ({"base_args": {"nesterov": 1}}, "nesterov of sgd must be True or False, got 1"),
        ({"base": "adam", "base_args": {"betas": 0.9}}, "betas of adam must be 2 numbers"),
    ],
)
def test_values_of_the_wrong_type_are_refused(given, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        Run(**given)


def test_numpy_numbers_are_converted():
    integers = ("epochs", "batch_size", "train_limit", "seed", "noise_seed")
    run = Run(
        noise=np.float32(0.5),
        hyper={"rho": np.float32(0.25)},
        **dict.fromkeys(integers, np.int64(7)),
    )
    plain = Run(noise=0.5, hyper={"rho": 0.25}, **dict.fromkeys(integers, 7))
    assert run == plain
    assert json.dumps(run.to_dict()) == json.dumps(plain.to_dict())


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="unknown setting 'color'"):
        Run.from_dict({"color": "red"})
