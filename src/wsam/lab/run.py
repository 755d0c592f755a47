"""A run as data: all settings that determine its result, and the key that names its record."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from types import MappingProxyType
from typing import Any

from wsam._core import validation
from wsam.lab.files import sha256
from wsam.lab.named_files import digest
from wsam.lab.options import checked_options, require_argument
from wsam.lab.settings import (
    AUTO,
    BASES,
    BLOCK_SIZE,
    CODE,
    DATA,
    DATA_SETTINGS,
    FILES,
    METRICS,
    MODEL_ARGS,
    MODELS,
    OPTIONAL_COUNTS,
    PRECISIONS,
    SCHEDULES,
    TASKS,
    default_model,
    geometry_defaults,
    has_preconditioner,
    hyper_defaults,
)
from wsam.lab.user_code import is_code, is_code_or_object
from wsam.lab.values import (
    Value,
    check_choice,
    check_flag,
    check_mapping,
    check_str,
    is_number,
    join_names,
    with_defaults,
)

# Added after version 0.1: a record without them is the same as before.
_OPTIONAL = (
    *("validation", "validation_seed", "metric", "image_size"),
    *("target", "task", "block_size", "digests", "model_args", "decay_start"),
)
_NAMES = ("data", "model", "metric", "method")
"""Settings that may name a file, whose digest is then part of the key."""
_MAX_SEED = 2**63  # torch's generators accept less than this on every device


@dataclass(frozen=True)
class Run:
    """All settings of one training run, checked and immutable.

    Two runs with equal settings are equal and have the same `key`. Omitted arguments are filled in
    with their defaults first, and ``1`` equals ``1.0``. Settings that are off (None or empty) do not
    enter the key, so a setting added later does not invalidate existing records.

    Args:
        data: One of `settings.DATA`; files: ``folder:PATH`` (images in folders named by class),
            ``table:PATH`` (CSV or Parquet), ``text:PATH`` or ``hf:PATH``; or the user's own function,
            ``path/file.py:function`` or ``package.module:function``.
        model: One of `settings.MODELS`, ``timm:NAME``, the user's own function, or ``auto``: ``cnn``
            for images, ``gpt`` for tokens, else ``mlp``. By default the one that fits the data.
        method: ``vanilla`` (the base optimizer alone), a name in `wsam.METHODS`, or the user's own
            subclass of `wsam.SharpnessAware`, ``path/file.py:Class``. Its file is imported for the
            defaults of its hyperparameters, unless `digests` has its digest, as in a record.
        hyper: Hyperparameters of the method, such as ``{"rho": 0.2, "gamma": 0.88}``.
        geometry: None for the method's own, or ``{"name": "adaptive", "eta": 0.01}``.
        base: The base optimizer, one of `settings.BASES`.
        base_args: Its arguments, such as ``{"lr": 0.05, "momentum": 0.9}``.
        options: ``max_norm``; ``every``: make two passes on every n-th step only; ``start``: after this
            share of the steps; ``threshold``: on steps whose gradient norm is that many deviations
            above its mean, falling to minus that many (AE-SAM). ``ascent_share``: compute the
            perturbation from this share of the batch. ``rho_warmup``, ``gamma_warmup``: rise linearly
            from 0 over this share of the steps; ``rho_follows_lr``: proportional to the learning rate.
            For ESAM ``gather``: run the second pass on the selected samples alone. For WSAM ``lean``,
            ``precondition`` (off: the published form), and ``reuse``: apply the last sharpness gradient
            on the steps between, with ``reuse_scaled``, ``reuse_average`` and ``reuse_weight`` as in
            `wsam.rule.Reuse`.
        epochs: Passes over the training data.
        batch_size: Samples per step.
        seed: Seed of the weights, the order of the samples and their augmentation.
        noise: Fraction of training labels that are redrawn uniformly over all classes.
        noise_seed: Seed of the label noise; 0 if `noise` is 0.
        schedule: Learning rate schedule: ``cosine`` (to zero, per step), ``constant``, or
            ``warmup-cosine`` (linear from zero over the first 5% of the steps, then cosine).
        decay_start: Keep the learning rate constant for this share of the steps before the cosine
            begins; None: it begins at once.
        precision: ``bf16`` (autocast) or ``fp32``.
        augment: Random crops and flips, if the data set defines them.
        pretrained: Folder or hub name of initial weights (``deit-base``, ``timm:``), or ``run:KEY``:
            the kept weights of another run in the results folder, but for the head.
        train_limit: Use only this many training samples.
        test_limit: Use only this many test samples.
        validation: Part of the training data to hold out: a fraction, or a number of samples. The
            curve then has the figures of these samples, and the test set is evaluated once, at the
            end. None: the curve has the figures of the test set.
        validation_seed: Seed of the held-out part, 0 by default; None if `validation` is None.
        metric: One of `settings.METRICS`, or a `wsam.lab.Metric` or function in the user's own file;
            None for the one that fits the data.
        image_size: Rows and columns that images of files are resized and cropped to; None for their
            own size, which must be the same for all, and for 224 with ``imagenet``.
        target: Column to predict, of ``table:`` and ``hf:``.
        task: ``classification`` or ``regression``; None to decide by the target's values.
        block_size: Characters per sample of ``text:``.
        digests: Start of the SHA-256 of each file that `data`, `model`, `metric` and `method` name.
            Computed if it is not given.
        model_args: Arguments of a named model, such as ``{"layers": 6, "width": 384}`` for ``gpt``; see
            `settings.MODEL_ARGS`.

    Example:
        >>> run = Run(method="wsam", hyper={"rho": 0.2, "gamma": 0.88}, epochs=5)
        >>> run == Run.from_dict(run.to_dict())
        True
        >>> run.replace(seed=1).key == run.key
        False
    """

    data: str = "digits"
    model: str = ""
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
    validation: float | int | None = None
    validation_seed: int | None = None
    metric: str | None = None
    image_size: int | None = None
    target: str | None = None
    task: str | None = None
    block_size: int | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    model_args: Mapping[str, Value] = field(default_factory=dict)
    decay_start: float | None = None

    def __post_init__(self) -> None:
        """Check every setting and convert it to its canonical form."""
        self._check_names()
        for name in ("digests", "hyper", "base_args", "options", "model_args"):
            check_mapping(name, getattr(self, name))
        self._freeze("hyper", self._checked_hyper())  # before a digest of the method is added
        self._freeze("digests", self._checked_digests())
        self._convert_numbers()
        check_flag("augment", self.augment)
        self._freeze("base_args", with_defaults(self.base, self.base_args, BASES[self.base]))
        options = checked_options(self.method, self.hyper, self.base, self.options)
        self._freeze("options", options)
        self._freeze("model_args", self._checked_model_args())
        if self.geometry is not None:
            self._freeze("geometry", self._checked_geometry(self.geometry))

    def _check_names(self) -> None:
        for name in ("data", "model", "method", "pretrained", "metric", "target"):
            if getattr(self, name) is not None:
                check_str(name, getattr(self, name))
        if not self.model:
            self._set("model", default_model(self.data))
        if not (self.data.startswith(FILES) or is_code_or_object(self.data)):
            check_choice("data", self.data, (*DATA, *(f"{kind}PATH" for kind in FILES), CODE))
        if not (self.model.startswith("timm:") or is_code_or_object(self.model)):
            check_choice("model", self.model, (*MODELS, AUTO, "timm:NAME", CODE))
        if not (self.metric is None or is_code_or_object(self.metric)):
            check_choice("metric", self.metric, (*METRICS, CODE))
        if self.task is not None:
            check_choice("task", self.task, TASKS)
        for name, prefixes in DATA_SETTINGS.items():
            if getattr(self, name) is not None and not self.data.startswith(prefixes):
                raise ValueError(
                    f"{name} applies to data {join_names(prefixes)} only, not to {self.data}"
                )
        if self.data.startswith("text:") and self.block_size is None:
            self._set("block_size", BLOCK_SIZE)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("base", self.base, BASES)

    def _checked_digests(self) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for what in _NAMES:
            name = getattr(self, what) or ""
            if not (is_code_or_object(name) or name.startswith(FILES)):
                continue
            if (now := self.digests.get(what) or digest(name)) is not None:
                found[what] = now
        return found

    def _checked_hyper(self) -> dict[str, Value]:
        """Return all hyperparameters.

        If the digest of the user's own method is given, as in a record, they are complete: a record
        must not cause the code to be executed.
        """
        if not (is_code(self.method) and "method" in self.digests):
            return with_defaults(self.method, self.hyper, hyper_defaults(self.method))
        return {n: tuple(v) if isinstance(v, list) else v for n, v in sorted(self.hyper.items())}

    def _convert_numbers(self) -> None:
        """Convert numbers, such as numpy's, to int and float, which JSON can store."""
        given = [name for name in OPTIONAL_COUNTS if getattr(self, name) is not None]
        for name in ("epochs", "batch_size", *given):
            self._set(name, validation.count(name, getattr(self, name), 1))
        for name in ("seed", "noise_seed"):
            self._set(name, _checked_seed(name, getattr(self, name)))
        self._set("noise", validation.number("noise", self.noise, 0, 1, high_open=False))
        self._set("noise_seed", self.noise_seed if self.noise else 0)
        if self.decay_start is not None:
            if self.schedule == "constant":
                raise ValueError("decay_start needs a schedule that decays, not constant")
            self._set("decay_start", validation.number("decay_start", self.decay_start, 0, 1))
        self._check_validation()

    def _check_validation(self) -> None:
        if self.validation is None:
            self._set("validation_seed", None)
            return
        if isinstance(self.validation, Integral):
            self._set("validation", validation.count("validation", self.validation, 1))
        else:
            size = validation.number("validation", self.validation, 0, 1, low_open=True)
            self._set("validation", size)
        self._set("validation_seed", _checked_seed("validation_seed", self.validation_seed or 0))

    def _checked_model_args(self) -> dict[str, Value]:
        defaults = MODEL_ARGS.get(self.model, {})
        found = with_defaults(f"model {self.model}", self.model_args, defaults)
        for name, value in found.items():
            if isinstance(value, int):
                validation.count(f"{name} of {self.model}", value, int(name != "lora_rank"))
        return {name: value for name, value in found.items() if value != defaults[name]}

    def _checked_geometry(self, geometry: Mapping[str, Value]) -> dict[str, Value]:
        given = dict(geometry) if isinstance(geometry, Mapping) else {}
        name = given.pop("name", None)
        if not isinstance(name, str):
            raise TypeError(
                f'geometry must have a "name", as {{"name": "adaptive"}}, got {geometry!r}'
            )
        require_argument(self.method, "geometry")
        known = geometry_defaults()
        check_choice("geometry", name, known)
        return {"name": name, **with_defaults(f"geometry {name}", given, known[name])}

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _freeze(self, name: str, value: dict[str, Value]) -> None:
        self._set(name, MappingProxyType(value))

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as JSON-compatible data; those in `_OPTIONAL` only if they are set."""
        found = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {n: v for n, v in found.items() if n not in _OPTIONAL or v not in (None, {})}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Run:
        """Return the run whose `to_dict` is given. Executes no code.

        Raises:
            ValueError: An unknown or invalid setting.
        """
        check_setting_names(settings)
        method = settings.get("method")
        digests = check_mapping("digests", settings.get("digests", {}))
        if isinstance(method, str) and is_code(method) and "method" not in digests:
            raise ValueError(f"the digest of the method {method} is missing")
        return cls(**settings)

    def replace(self, **changes: Any) -> Run:
        """Return a copy with some settings changed.

        A new method or base optimizer gets its default arguments unless they are given too. Digests
        of new files are computed. Hyperparameters that are not given keep their values if the method
        is the user's own, whose code is not executed for this.
        """
        kept = {what: digest for what, digest in self.digests.items() if what not in changes}
        changes = {"digests": kept, **changes}
        if "method" in kept and "hyper" in changes:  # of the user's own: its defaults are not known
            changes["hyper"] = with_defaults(self.method, changes["hyper"], self.hyper)
        if "method" in changes:
            changes = {"hyper": {}, "options": {}, "geometry": None, **changes}
        if "base" in changes:
            changes = {"base_args": {}, **changes}
        if changes.get("model", self.model) != self.model:
            changes = {"model_args": {}, **changes}
        return dataclasses.replace(self, **changes)

    @property
    def canonical(self) -> str:
        """The settings as canonical JSON: sorted, compact, without settings that are off."""
        settings = {k: v for k, v in self.to_dict().items() if v is not None and v != {}}
        return json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of `canonical`: the name of the record."""
        return sha256(self.canonical.encode())[:12]

    @property
    def title(self) -> str:
        """A short description: ``cifar10 resnet18 wsam gamma=0.88 rho=0.2 seed=0``.

        Data with a target column is followed by its name: ``table:houses.csv target=price``.
        """
        numbers = {name: value for name, value in self.hyper.items() if is_number(value)}
        hyper = [f"{name}={value:g}" for name, value in numbers.items()]
        geometry = [str(self.geometry["name"])] if self.geometry else []
        noise = [f"noise={self.noise:g}"] if self.noise else []
        target = [f"target={self.target}"] if self.target else []
        words = [self.data, *target, self.model, self.method, *geometry, *hyper, *noise]
        return " ".join([*words, f"seed={self.seed}"])

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        # Mapping proxies cannot be pickled; unpickling checks the settings again.
        return (Run.from_dict, (self.to_dict(),))


def with_wsam_defaults(run: Run, given: Collection[str]) -> Run:
    """Return a run with the defaults of `wsam.WSAM`, which preconditions over adaptive bases.

    A `Run` has the published form unless it has the option ``precondition``. The command line, `fit`
    and comparisons train what the class trains. Other runs are returned unchanged.

    Args:
        run: The run.
        given: The hyperparameters and options that were given; these are kept.

    Example:
        >>> run = with_wsam_defaults(Run(method="wsam", base="adamw"), given=())
        >>> run.hyper["gamma"], dict(run.options)
        (0.5, {'precondition': True})
    """
    if run.method != "wsam" or not has_preconditioner(run.base):
        return run
    if "precondition" not in given:
        run = run.replace(options={**run.options, "precondition": True})
    if "gamma" not in given and run.options.get("precondition"):
        run = run.replace(hyper={**run.hyper, "gamma": 0.5})  # SAM's weight over such a base
    return run


def with_seed(run: Run, seed: int) -> Run:
    """Return a run with another seed, which also seeds the label noise: repeats are independent.

    With the same seed, runs that differed only in their seeds are equal.
    """
    return run.replace(seed=seed, noise_seed=seed)


def check_setting_names(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that is not a setting of `Run`."""
    known = [f.name for f in dataclasses.fields(Run)]
    for name in settings:
        check_choice("setting", name, known)


def _checked_seed(name: str, value: object) -> int:
    seed = validation.count(name, value)
    if seed >= _MAX_SEED:
        raise ValueError(f"{name} must be less than 2**63, got {seed}")
    return seed


def _plain(value: Any) -> Any:
    """Convert mapping proxies and tuples to dicts and lists."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
