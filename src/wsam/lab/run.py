"""A run as data: everything that decides its outcome, and a key that names its record."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from wsam import checks
from wsam.lab import names
from wsam.lab.names import Value

_SEEDS = 2**63  # what torch's generators take on every device


@dataclass(frozen=True)
class Run:
    """One training run, from data to record, as plain checked data.

    Two runs with the same settings are equal and have the same `key`; arguments left out are
    filled in with their defaults first, and ``1`` is the same as ``1.0``. Settings that are off
    (None or empty) do not enter the key, so a setting added later leaves old records valid.

    Args:
        data: One of `names.DATA`, or ``folder:NAME`` for images in folders named by class.
        model: One of `names.MODELS`, or ``timm:NAME``.
        method: ``vanilla`` (the base alone) or a name of `wsam.METHODS`.
        hyper: The method's own hyperparameters, such as ``{"rho": 0.2, "gamma": 0.88}``.
        geometry: None for the method's own, or ``{"name": "adaptive", "eta": 0.01}``.
        base: The base optimizer, one of `names.BASES`.
        base_args: Its arguments, such as ``{"lr": 0.05, "momentum": 0.9}``.
        options: Options common to all methods: ``lean``, ``max_norm``.
        epochs: How many times the training data is passed through.
        batch_size: Images per step.
        seed: Of the weights, the order of the images and their augmentation.
        noise: Fraction of training labels drawn anew, uniformly over all classes.
        noise_seed: Of that drawing; of no effect, and 0, where `noise` is 0.
        schedule: Of the learning rate: ``cosine`` (to zero, step by step) or ``constant``.
        precision: ``bf16`` (autocast) or ``fp32``.
        augment: Random crops and flips where the data set has them.
        pretrained: A folder or hub name of weights to start from (``deit-base``, ``timm:``).
        train_limit: Use only this many training images.
        test_limit: Use only this many test images.

    Example:
        >>> run = Run(method="wsam", hyper={"rho": 0.2, "gamma": 0.88}, epochs=5)
        >>> run == Run.from_dict(run.to_dict())
        True
        >>> run.replace(seed=1).key == run.key
        False
    """

    data: str = "digits"
    model: str = "cnn"
    method: str = "wsam"
    hyper: Mapping[str, Value] = field(default_factory=dict)
    geometry: Mapping[str, Value] | None = None
    base: str = "sgd"
    base_args: Mapping[str, Value] = field(default_factory=dict)
    options: Mapping[str, Value] = field(default_factory=dict)
    epochs: int = 200
    batch_size: int = 128
    seed: int = 0
    noise: float = 0.0
    noise_seed: int = 0
    schedule: str = "cosine"
    precision: str = "fp32"
    augment: bool = True
    pretrained: str | None = None
    train_limit: int | None = None
    test_limit: int | None = None

    def __post_init__(self) -> None:
        """Check every setting and bring it to its one canonical form."""
        self._check_names()
        self._take_numbers()
        checks.flag("augment", self.augment)
        for name in ("hyper", "base_args", "options"):
            names.mapping(name, getattr(self, name))
        own = names.methods()[self.method]
        self._freeze("hyper", names.filled(self.method, self.hyper, own))
        self._freeze("base_args", names.filled(self.base, self.base_args, names.BASES[self.base]))
        self._freeze("options", self._checked_options())
        if self.geometry is not None:
            self._freeze("geometry", self._checked_geometry(self.geometry))

    def _check_names(self) -> None:
        for name in ("data", "model"):
            names.word(name, getattr(self, name))
        if self.pretrained is not None:
            names.word("pretrained", self.pretrained)
        if not self.data.startswith("folder:"):
            names.chosen("data", self.data, (*names.DATA, "folder:NAME"))
        if not self.model.startswith("timm:"):
            names.chosen("model", self.model, (*names.MODELS, "timm:NAME"))
        names.chosen("schedule", self.schedule, names.SCHEDULES)
        names.chosen("precision", self.precision, names.PRECISIONS)
        names.chosen("method", self.method, names.methods())
        names.chosen("base", self.base, names.BASES)

    def _take_numbers(self) -> None:
        """Keep numbers as Python's own, whoever's they were: JSON knows no others."""
        limits = [n for n in ("train_limit", "test_limit") if getattr(self, n) is not None]
        for name in ("epochs", "batch_size", *limits):
            self._set(name, checks.count(name, getattr(self, name), 1))
        for name in ("seed", "noise_seed"):
            self._set(name, checks.count(name, getattr(self, name)))
            if getattr(self, name) >= _SEEDS:
                raise ValueError(f"{name} must be less than 2**63, got {getattr(self, name)}")
        self._set("noise", checks.number("noise", self.noise, 0, 1, high_open=False))
        self._set("noise_seed", self.noise_seed if self.noise else 0)

    def _checked_options(self) -> dict[str, Value]:
        defaults = {} if self.method == names.VANILLA else names.OPTIONS
        options = names.filled(f"{self.method}'s options", self.options, defaults)
        return {name: value for name, value in options.items() if value != defaults[name]}

    def _checked_geometry(self, geometry: Mapping[str, Value]) -> dict[str, Value]:
        given = dict(geometry) if isinstance(geometry, Mapping) else {}
        name = given.pop("name", None)
        if not isinstance(name, str):
            raise TypeError(
                f'geometry must hold a "name", as {{"name": "adaptive"}}, got {geometry!r}'
            )
        if not names.takes_geometry(self.method):
            takers = [method for method in names.methods() if names.takes_geometry(method)]
            raise ValueError(
                f"{self.method} does not take a geometry; those that do: {names.listed(takers)}"
            )
        known = names.geometries()
        names.chosen("geometry", name, known)
        return {"name": name, **names.filled(f"geometry {name}", given, known[name])}

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _freeze(self, name: str, value: dict[str, Value]) -> None:
        self._set(name, MappingProxyType(value))

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain data that JSON can hold."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Run:
        """Make a run of what `to_dict` returned; unknown settings are refused.

        Raises:
            ValueError: A setting that a run does not have.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for name in settings:
            names.chosen("setting", name, known)
        return cls(**settings)

    def replace(self, **changes: Any) -> Run:
        """Return a copy with some settings changed.

        A new method or base starts from its own defaults unless its arguments are given too.
        """
        if "method" in changes:
            changes = {"hyper": {}, "options": {}, "geometry": None, **changes}
        if "base" in changes:
            changes = {"base_args": {}, **changes}
        return dataclasses.replace(self, **changes)

    @property
    def canonical(self) -> str:
        """The settings as canonical JSON: sorted, compact, without those that are off."""
        settings = {k: v for k, v in self.to_dict().items() if v is not None and v != {}}
        return json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits of the settings' SHA-256: the name of the record."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:12]

    @property
    def title(self) -> str:
        """A short line for people: ``cifar10 resnet18 wsam gamma=0.88 rho=0.2 seed=0``."""
        numbers = {name: value for name, value in self.hyper.items() if names.is_number(value)}
        hyper = [f"{name}={value:g}" for name, value in numbers.items()]
        geometry = [str(self.geometry["name"])] if self.geometry else []
        noise = [f"noise={self.noise:g}"] if self.noise else []
        words = [self.data, self.model, self.method, *geometry, *hyper, *noise]
        return " ".join([*words, f"seed={self.seed}"])

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        # Frozen mappings do not pickle; plain data does, and is checked again on the way in.
        return (Run.from_dict, (self.to_dict(),))


def _plain(value: Any) -> Any:
    """Turn frozen mappings and tuples into what JSON reads back: dicts and lists."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
