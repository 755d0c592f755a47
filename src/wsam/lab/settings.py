"""The names and arguments a run accepts: data, models, methods, geometries, base optimizers.

Methods and geometries are read from the library, so a newly registered method can be trained
without changes here. A method may also be a class in a file of the user's own. The arguments of base
optimizers are listed with their defaults: a record then contains all of them, and its key does not
depend on the version of torch.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from wsam.lab.errors import UserCodeError
from wsam.lab.user_code import is_code, load
from wsam.lab.values import Value, check_choice, is_number, is_value

if TYPE_CHECKING:
    from wsam.geometry import Geometry
    from wsam.optimizer import SharpnessAware

DATA = ("digits", "cifar10", "cifar100", "fashion", "imagenet")
MODELS = ("cnn", "mlp", "resnet18", "wrn-28-10", "deit-base", "gpt", "vit")
_TRANSFORMER: dict[str, Value] = {"heads": 4, "dropout": 0.0, "lora_rank": 0}
MODEL_ARGS: dict[str, dict[str, Value]] = {
    "mlp": {"width": 64},
    "gpt": {"layers": 4, "width": 128, **_TRANSFORMER},
    "vit": {"layers": 8, "width": 256, "patch": 4, **_TRANSFORMER},
}
"""Arguments of the models that have any, with their defaults.

A `lora_rank` above 0 freezes all weights but the head, and trains adapters of that rank.
"""
AUTO = "auto"
"""The named model that fits the inputs: ``cnn`` for images, ``gpt`` for tokens, else ``mlp``."""
FILES = ("folder:", "table:", "text:", "hf:")
"""Prefixes of data in files of the user's own."""
TASKS = ("classification", "regression")
BLOCK_SIZE = 64
METRICS = ("error", "accuracy", "loss", "mse", "macro-f1")
IMAGE_FILES = ("folder:", "imagenet", "hf:")
"""Prefixes of data that is decoded from image files."""
DATA_SETTINGS = {
    "image_size": IMAGE_FILES,
    "target": ("table:", "hf:"),
    "task": ("table:", "hf:"),
    "block_size": ("text:",),
}
"""Settings that apply to some data only, with its prefixes."""
OPTIONAL_COUNTS = ("train_limit", "test_limit", "image_size", "block_size")
"""Settings that are whole numbers or None."""
CODE = "FILE.py:FUNCTION"
CLASS = "FILE.py:CLASS"
"""Placeholders in messages that list what is allowed."""
TRAIN, VALIDATION, TEST = SPLITS = ("train", "validation", "test")
SCHEDULES = ("cosine", "constant", "warmup-cosine")
PRECISIONS = ("fp32", "bf16")
VANILLA = "vanilla"

_ADAM: dict[str, Value] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
}
BASES: dict[str, dict[str, Value]] = {
    "sgd": {
        "lr": 0.05,
        "momentum": 0.9,
        "dampening": 0.0,
        "nesterov": False,
        "weight_decay": 1e-3,
    },
    "adam": _ADAM | {"amsgrad": False},
    "adamw": _ADAM | {"weight_decay": 0.01, "amsgrad": False},
    "nadam": _ADAM | {"lr": 2e-3, "momentum_decay": 4e-3},
    "radam": dict(_ADAM),
    "adamax": _ADAM | {"lr": 2e-3},
    "rmsprop": {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0},
    "adagrad": {"lr": 0.01, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0},
    "adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
}
BASE_CLASSES = {
    "sgd": "SGD",
    "adam": "Adam",
    "adamw": "AdamW",
    "nadam": "NAdam",
    "radam": "RAdam",
    "adamax": "Adamax",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
}

_REAL = ("rho", "gamma", "alpha")
SEED = "seed"
"""An argument of some methods and geometries that is set to the run's seed."""
OPTIONS: dict[str, Value] = {
    "lean": False,
    "max_norm": None,
    "every": 1,
    "reuse": False,
    "precondition": False,
    "start": 0.0,
    "threshold": None,
    "reuse_scaled": False,
    "reuse_average": 0.0,
    "reuse_weight": 1.0,
    "gather": False,
    "ascent_share": 1.0,
    "gamma_warmup": 0.0,
    "rho_warmup": 0.0,
    "rho_follows_lr": False,
}
"""Options that a run may set, with the values that turn them off; `Run` describes them.

A run without `precondition` uses the published form of WSAM, over every base.
"""


def default_model(data: str) -> str:
    """Return the model of a run that names none, without reading its data.

    Example:
        >>> default_model("digits"), default_model("table:t.csv"), default_model("my.py:data")
        ('cnn', 'mlp', 'auto')
    """
    kind = data.partition(":")[0]
    return {"table": "mlp", "text": "gpt", "folder": "cnn"}.get(
        kind, "cnn" if data in DATA else AUTO
    )


def _parameters(cls: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class."""
    return _cached_signature(cls).parameters


_cached_signature = cache(inspect.signature)  # every `Run` checks its settings


def method_class(method: str) -> type[SharpnessAware]:
    """Return the class of a method: one of `wsam.METHODS`, or one of the user's own, which is imported.

    Args:
        method: A name in `wsam.METHODS`, ``path/file.py:Class`` or ``package.module:Class``.

    Raises:
        FileNotFoundError: There is no such file or module.
        UserCodeError: It is not a subclass of `wsam.SharpnessAware`.
    """
    from wsam.methods import METHODS
    from wsam.optimizer import SharpnessAware

    if not is_code(method):
        return METHODS[method]
    found = load(method)
    if not isinstance(found, type) or not issubclass(found, SharpnessAware):
        raise UserCodeError(f"{method} must be a subclass of wsam.SharpnessAware, got {found!r}")
    return found


def hyper_defaults(method: str) -> dict[str, Value]:
    """Return the hyperparameters of a method with their defaults; imports one of the user's own.

    Raises:
        FileNotFoundError: There is no such file or module.
        ValueError: It is not a method, or a default cannot be stored in a record.
    """
    if not is_code(method):
        known = method_defaults()
        check_choice("method", method, (*known, CLASS))
        return known[method]
    cls: Any = method_class(method)
    found = dict(_own_defaults(cls))
    for name, default in found.items():
        if not is_value(default):
            raise UserCodeError(
                f"{method}: the argument {name} needs a default that is a number, a text, True, "
                "False, None or a tuple of numbers"
            )
    # rho=1 in a signature does not mean that rho is a whole number.
    real = {n: float(v) for n, v in found.items() if n in _REAL and is_number(v)}
    return {**found, **real}


def method_defaults() -> dict[str, dict[str, Value]]:
    """Return the hyperparameters of every method of the library with their defaults.

    Example:
        >>> method_defaults()["wsam"]
        {'rho': 0.05, 'gamma': 0.9}
    """
    from wsam.methods import METHODS

    methods: Mapping[str, Any] = METHODS
    return {VANILLA: {}, **{name: dict(_own_defaults(cls)) for name, cls in methods.items()}}


@cache
def _own_defaults(method: Any) -> dict[str, Value]:
    """Return the hyperparameters of a method's class with their defaults."""
    from wsam.methods import WSAM
    from wsam.optimizer import SharpnessAware

    common = _parameters(SharpnessAware).keys() - {"rho"} | {SEED, "reuse", "precondition"}
    keywords = (p for p in _parameters(method).values() if p.kind is p.KEYWORD_ONLY)
    found = {p.name: p.default for p in keywords if p.name not in common}
    # A run has the published form by default, and its gamma.
    return {**found, "gamma": 0.9} if method is WSAM else found


def accepts(method: str, argument: str) -> bool:
    """Return whether a method has an argument that only some have, such as ``geometry``."""
    return method != VANILLA and argument in _parameters(method_class(method))


@cache
def has_preconditioner(base: str) -> bool:
    """Return whether WSAM can precondition its sharpness term over a base."""
    import torch

    from wsam._core.preconditioners import find_preconditioner

    optimizer = getattr(torch.optim, BASE_CLASSES[base])([torch.zeros(1, requires_grad=True)])
    return find_preconditioner(optimizer) is not None


def geometry_defaults() -> dict[str, dict[str, Value]]:
    """Return the arguments of every geometry with their defaults."""
    return {
        name: {f.name: cast(Value, f.default) for f in dataclasses.fields(cls) if _is_argument(f)}
        for name, cls in geometry_classes().items()
    }


def _is_argument(field: dataclasses.Field[Any]) -> bool:
    """Return whether a run sets a field: not the seed, and not the names of normalization layers."""
    return field.name != SEED and field.default is not dataclasses.MISSING


def geometry_classes() -> dict[str, type[Geometry]]:
    """Return the geometries that a run may select, by name."""
    from wsam.geometry import Adaptive, Fisher, Masked, Only, PerLayer, Preconditioned

    return {
        "adaptive": Adaptive,
        "fisher": Fisher,
        "masked": Masked,
        "norm-layers": Only,
        "per-layer": PerLayer,
        "preconditioned": Preconditioned,
    }
