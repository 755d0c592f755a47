"""`train_step` makes the steps that the lower-level interface makes."""

import contextlib
import copy
import doctest
import functools
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from helpers import ALL, RULES, covering, gap, make_method, same, save_and_load, snapshot
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import wsam
from wsam import training_step
from wsam.schedule import Every

STEPS = 4
BASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


def network() -> nn.Module:
    torch.manual_seed(1)
    hidden = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)]
    return nn.Sequential(*hidden, nn.Linear(8, 3))


def smooth_network() -> nn.Module:
    """Without layers that depend on the whole batch."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches(count: int = STEPS, size: int = 10) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, size, 6, generator=generator)
    y = torch.randint(0, 3, (count, size), generator=generator)
    return list(zip(x, y, strict=True))


def loss_of(opt: Any, model: nn.Module) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a loss function that also returns logits, and selects samples (ESAM)."""

    def loss_fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x.to(next(model.parameters()).dtype))
        each = cross_entropy(logits.float(), y, reduction="none")
        return (opt.select(each) if hasattr(opt, "select") else each.mean()), logits

    return loss_fn


def by_closure(opt: Any, loss_fn: Any, x: Tensor, y: Tensor) -> Tensor:
    def closure() -> Tensor:
        opt.zero_grad()
        loss = loss_fn(x, y)[0]
        loss.backward()
        return loss

    return opt.step(closure).detach()


def everything(opt: torch.optim.Optimizer, model: nn.Module) -> Any:
    sharpness = getattr(opt, "sharpness", None)
    return snapshot(opt), dict(model.state_dict()), sharpness, torch.get_rng_state()


def test_the_example_of_the_docstring() -> None:
    result = doctest.testmod(training_step)
    assert result.attempted > 5
    assert result.failed == 0


# --- Equal to the lower level ----------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", ALL)
def test_equals_a_closure_bitwise(name: str, base: str) -> None:
    """With BatchNorm and dropout: weights, statistics, state, loss, sharpness, generators."""
    models = network(), network()
    opts = [make_method(name, BASES[base](m.parameters()), model=m) for m in models]
    step = wsam.train_step(opts[0], loss_of(opts[0], models[0]), gather_selected=False)
    for x, y in batches():
        torch.manual_seed(5)
        loss, _ = step(x, y)
        found = copy.deepcopy((loss, everything(opts[0], models[0])))
        torch.manual_seed(5)
        expected = by_closure(opts[1], loss_of(opts[1], models[1]), x, y)
        assert same(found, (expected, everything(opts[1], models[1])))


@pytest.mark.parametrize("options", [{"max_norm": 0.1}, {"when": Every(2)}, {"lean": True}])
def test_options_of_the_optimizer(options: dict[str, Any]) -> None:
    models = network(), network()
    opts = [wsam.WSAM(BASES["sgd"](m.parameters()), model=m, **options) for m in models]
    step = wsam.train_step(opts[0], loss_of(opts[0], models[0]))
    for x, y in batches():
        torch.manual_seed(5)
        step(x, y)
        torch.manual_seed(5)
        by_closure(opts[1], loss_of(opts[1], models[1]), x, y)
    assert same(everything(opts[0], models[0]), everything(opts[1], models[1]))


@pytest.mark.parametrize("base", BASES)
def test_plain_optimizer(base: str) -> None:
    models = network(), network()
    opts = [BASES[base](m.parameters()) for m in models]
    step = wsam.train_step(opts[0], loss_of(opts[0], models[0]))
    for x, y in batches():
        torch.manual_seed(5)
        loss, logits = step(x, y)
        torch.manual_seed(5)
        assert same(loss, by_closure(opts[1], loss_of(opts[1], models[1]), x, y))
        assert not loss.requires_grad
        assert not logits.requires_grad
    assert same(everything(opts[0], models[0]), everything(opts[1], models[1]))


@pytest.mark.parametrize("name", RULES)
def test_resume_in_the_middle(name: str) -> None:
    def make() -> tuple[nn.Module, Any, Any]:
        model = network()
        opt = make_method(name, BASES["adamw"](model.parameters()), model=model)
        return model, opt, wsam.train_step(opt, loss_of(opt, model))

    data = batches(6)
    model, opt, step = make()
    for x, y in data[:3]:
        step(x, y)
    saved = save_and_load({"model": model.state_dict(), "optimizer": opt.state_dict()})
    random = torch.get_rng_state()
    losses = [step(x, y)[0] for x, y in data[3:]]
    other, resumed, again = make()
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    torch.set_rng_state(random)
    assert same([again(x, y)[0] for x, y in data[3:]], losses)
    assert same(everything(resumed, other), everything(opt, model))


def test_under_no_grad() -> None:
    model = network()
    opt = wsam.SAM(BASES["sgd"](model.parameters()), model=model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for options in ({}, {"scaler": scaler}):
        before = model[0].weight.detach().clone()
        with torch.no_grad():
            wsam.train_step(opt, loss_of(opt, model), **options)(*batches(1)[0])
        assert not torch.equal(before, model[0].weight)


# --- Batches and outputs ---------------------------------------------------------------------------


class Output(OrderedDict):
    """A dict with attributes, as transformers.ModelOutput, but unknown to torch's pytrees."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Named(NamedTuple):
    loss: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Predictions:
    logits: Tensor
    name: str


RETURNS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "loss": lambda loss, logits: loss,
    "tuple": lambda loss, logits: (loss, logits),
    "named": Named,
    "nested": lambda loss, logits: (loss, {"all": [logits, (logits.sum(), "text", None)]}),
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "output": lambda loss, logits: Output(loss=loss, logits=logits),
    "dataclass": lambda loss, logits: (loss, Predictions(logits, "text")),
    "one_element": lambda loss, logits: (loss[None], logits),
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("kind", RETURNS)
def test_every_kind_of_return(kind: str, micro_batches: int) -> None:
    """Outputs are those of the first pass: at w, detached, in the containers of the loss function."""
    model = smooth_network()
    opt = wsam.SAM(BASES["sgd"](model.parameters()), rho=0.5, model=model)
    (x, y), *_ = batches()
    x = x.double()
    logits = model(x).detach()
    loss = cross_entropy(logits, y)

    def loss_fn(x: Tensor, y: Tensor) -> Any:
        logits = model(x)
        return RETURNS[kind](cross_entropy(logits, y), logits)

    found, outputs = wsam.train_step(opt, loss_fn, micro_batches=micro_batches)(x, y)
    torch.testing.assert_close(found, loss)
    assert not found.requires_grad
    assert opt.sharpness > 0
    if kind == "loss":
        assert outputs is None
    elif kind in {"tuple", "named", "one_element"}:
        assert not outputs.requires_grad
        torch.testing.assert_close(outputs, logits)
    elif kind == "nested":
        first, (total, text, nothing) = outputs["all"]
        torch.testing.assert_close(first, logits)
        assert not first.requires_grad
        assert not total.requires_grad
        assert (text, nothing) == ("text", None)
    elif kind == "dataclass":
        assert (type(outputs), outputs.name) == (Predictions, "text")
        torch.testing.assert_close(outputs.logits, logits)
        assert not outputs.logits.requires_grad
    else:
        assert type(outputs) is (Output if kind == "output" else dict)
        torch.testing.assert_close(outputs["logits"], logits)
        torch.testing.assert_close(outputs["loss"], loss)
        assert not any(value.requires_grad for value in outputs.values())
    if kind == "output":
        assert outputs.logits is outputs["logits"]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("method", ["wsam", "base"])
def test_an_output_that_is_a_parameter(method: str, micro_batches: int) -> None:
    """It is the value at w, not that after the step."""
    model, scale = smooth_network(), nn.Parameter(torch.tensor(2.0).double())
    base = torch.optim.SGD([*model.parameters(), scale], lr=0.5)
    opt = base if method == "base" else wsam.WSAM(base, rho=0.5, model=model)

    def loss_fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return cross_entropy(scale * model(x.double()), y), scale

    found = wsam.train_step(opt, loss_fn, micro_batches=micro_batches)(*batches()[0])[1]
    assert found == 2.0
    assert not found.requires_grad
    assert scale != 2.0


@pytest.mark.slow
def test_a_hugging_face_model() -> None:
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.modeling_outputs import SequenceClassifierOutput

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=20, intermediate_size=8, **sizes)
    model = BertForSequenceClassification(config)
    opt = wsam.SAM(BASES["adamw"](model.parameters()), model=model)
    batch = {"input_ids": torch.randint(0, 20, (4, 5)), "labels": torch.tensor([0, 1, 1, 0])}
    for options in ({}, {"micro_batches": 2}):
        loss, outputs = wsam.train_step(opt, model, **options)(**batch)
        assert type(outputs) is SequenceClassifierOutput
        assert outputs.logits.shape == (4, 2)
        assert not outputs.logits.requires_grad
        torch.testing.assert_close(outputs.loss, loss)
    with pytest.raises(TypeError, match="its loss is NoneType"):
        wsam.train_step(opt, model)(input_ids=batch["input_ids"])


CALLS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "args": lambda make, x, y: make(lambda loss, *batch: loss(*batch))(x, y),
    "kwargs": lambda make, x, y: make(lambda loss, **batch: loss(**batch))(x=x, y=y),
    "dict": lambda make, x, y: make(lambda loss, b: loss(b["x"], b["y"]))({"x": x, "y": y}),
    "mixed": lambda make, x, y: make(lambda loss, x, n, *, y: loss(x * n, y[0]))(x, 1, y=[y]),
}


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_batches_of_keywords_and_containers(micro_batches: int) -> None:
    def weights_after(call: Any) -> Any:
        model = smooth_network()
        opt = wsam.WSAM(BASES["sgd"](model.parameters()), model=model)
        loss_fn = loss_of(opt, model)

        def make(function: Any) -> Any:
            bound = functools.partial(function, loss_fn)
            return wsam.train_step(opt, bound, micro_batches=micro_batches)

        call(make, *batches()[0])
        return snapshot(opt)

    first, *others = map(weights_after, CALLS.values())
    for other in others:
        assert same(other, first)


# --- Precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_bf16_autocast(name: str) -> None:
    models = network(), network()
    opts = [make_method(name, BASES["sgd"](m.parameters()), model=m) for m in models]
    dtypes = []

    def recording(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = loss_of(opts[0], models[0])(x, y)
        dtypes.append(logits.dtype)
        return loss, logits

    def by_hand(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(opts[1], models[1])(x, y)

    step = wsam.train_step(opts[0], recording, autocast=torch.bfloat16)
    for x, y in batches():
        torch.manual_seed(5)
        step(x, y)
        torch.manual_seed(5)
        by_closure(opts[1], by_hand, x, y)
    assert set(dtypes) == {torch.bfloat16}
    assert same(everything(opts[0], models[0]), everything(opts[1], models[1]))


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


@covering(name=[*ALL, "base"], micro_batches=[1, 3], max_norm=[None, 0.1])
def test_scaler_equals_the_unscaled_step(
    name: str, micro_batches: int, max_norm: float | None
) -> None:
    models, scaler = (smooth_network(), smooth_network()), new_scaler()
    bases = [BASES["sgd"](m.parameters()) for m in models]
    opts: list[Any] = bases
    if name != "base":
        opts = [make_method(name, base, max_norm=max_norm) for base in bases]
    steps = [
        wsam.train_step(o, loss_of(o, m), micro_batches=micro_batches, scaler=s)
        for o, m, s in zip(opts, models, (scaler, None), strict=True)
    ]
    for x, y in batches():
        pairs = [step(x, y) for step in steps]
        torch.testing.assert_close(pairs[0], pairs[1])
        if name != "base":
            torch.testing.assert_close(
                opts[0].sharpness, opts[1].sharpness, rtol=1e-5, atol=1e-6, equal_nan=True
            )
    assert gap(list(models[0].parameters()), list(models[1].parameters())) < 1e-6
    assert scaler.get_scale() == 4096.0, "it has grown after two and four steps"


def test_scaler_can_be_saved_after_an_error() -> None:
    """A batch that raises leaves no unfinished iteration in the scaler."""
    model, scaler = smooth_network(), new_scaler()

    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("no batch")

    opt = wsam.SAM(BASES["sgd"](model.parameters()), model=model)
    with pytest.raises(RuntimeError, match="no batch"):
        wsam.train_step(opt, fail, scaler=scaler)(torch.ones(2, 3))
    pickle.dumps(scaler)


def test_scaler_with_an_interval_that_reads_the_norm() -> None:
    models = smooth_network(), smooth_network()
    for model, scaler in zip(models, (None, new_scaler()), strict=True):
        when = wsam.schedule.NormAbove(factor=-1.0)
        opt = wsam.SAM(BASES["sgd"](model.parameters()), when=when)
        step = wsam.train_step(opt, loss_of(opt, model), scaler=scaler)
        for x, y in batches():
            step(x, y)
    assert gap(list(models[0].parameters()), list(models[1].parameters())) < 1e-6


@covering(name=RULES, bad_pass=[1, 2])
def test_scaler_skips_an_overflow(name: str, bad_pass: int) -> None:
    model, scaler = smooth_network(), new_scaler()
    opt = make_method(name, BASES["sgd"](model.parameters()))
    passes = 0

    def loss_fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal passes
        passes += 1
        loss, logits = loss_of(opt, model)(x, y)
        return loss * (torch.inf if passes == bad_pass else 1.0), logits

    step = wsam.train_step(opt, loss_fn, scaler=scaler)
    before = snapshot(opt)
    step(*batches()[0])
    assert same(snapshot(opt)["weights"], before["weights"])
    assert (opt.skipped, scaler.get_scale()) == (1, 512.0)
    step(*batches()[1])
    assert not same(snapshot(opt)["weights"], before["weights"])


class Parallel(nn.Sequential):
    """Has what `local=True` uses of DistributedDataParallel."""

    require_backward_grad_sync = True
    find_unused_parameters = static_graph = False

    def forward(self, x: Tensor) -> Tensor:
        self.require_forward_param_sync = self.require_backward_grad_sync
        return super().forward(x)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.require_backward_grad_sync = False
        yield
        self.require_backward_grad_sync = True


@pytest.mark.parametrize("name", ["sam", "wsam", "msam"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_skipped_step_restores_statistics(scaled: bool, name: str) -> None:
    """One NaN batch does not make running statistics NaN for good, with a GradScaler neither."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = wsam.create(name, base, nonfinite="skip", model=model)
    scaler = new_scaler() if scaled else None
    step = wsam.train_step(opt, lambda x: model(x).square().mean(), scaler=scaler)
    for _ in range(2):
        step(torch.ones(3, 5))
    before = copy.deepcopy(model.state_dict())
    step(torch.full((3, 5), torch.nan))
    assert opt.skipped == 1
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("scaler", [None, new_scaler()], ids=["plain", "scaled"])
def test_local_omits_the_first_reduction(scaler: torch.amp.GradScaler | None) -> None:
    model = Parallel(smooth_network())
    opt = wsam.SAM(BASES["sgd"](model.parameters()), model=model, local=True)
    reduces: list[bool] = []

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        reduces.append(model.require_backward_grad_sync)
        return cross_entropy(model(x.double()), y)

    wsam.train_step(opt, loss_fn, scaler=scaler)(*batches()[0])
    assert reduces == [False, True]


@pytest.mark.parametrize("name", ["sam", "wsam"])
def test_scaler_with_an_interval(name: str) -> None:
    """The other steps have one pass, and their sharpness is not measured."""
    passes = 0

    def train(scaler: torch.amp.GradScaler | None) -> list[Tensor]:
        nonlocal passes
        passes = 0
        model = smooth_network()
        options = {"reuse": True} if name == "wsam" else {}
        opt = wsam.create(name, BASES["sgd"](model.parameters()), when=Every(2), **options)

        def loss_fn(x: Tensor, y: Tensor) -> Any:
            nonlocal passes
            passes += 1
            return loss_of(opt, model)(x, y)

        step = wsam.train_step(opt, loss_fn, scaler=scaler)
        sharpness = []
        for x, y in batches():
            step(x, y)
            sharpness.append(bool(opt.sharpness.isnan()))
        assert sharpness == [False, True, False, True]
        assert passes == 6
        return list(model.parameters())

    assert same(train(new_scaler()), train(None)), "the scale is a power of two"


def test_scaler_skips_an_overflow_of_a_step_between() -> None:
    model, scaler = smooth_network(), new_scaler()
    opt = wsam.WSAM(BASES["sgd"](model.parameters()), when=Every(2), reuse=True)
    factors = iter([1.0, 1.0, torch.inf, 1.0, 1.0, 1.0])

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(opt, model)(x, y)[0] * next(factors)

    step = wsam.train_step(opt, loss_fn, scaler=scaler)
    first, second, third, _ = batches()
    step(*first)
    before = snapshot(opt)
    step(*second)
    assert same(snapshot(opt)["weights"], before["weights"])
    assert (opt.skipped, scaler.get_scale()) == (1, 512.0)
    step(*third)
    assert not same(snapshot(opt)["weights"], before["weights"])


@pytest.mark.parametrize("scaler", [None, new_scaler()], ids=["plain", "scaled"])
def test_a_radius_of_zero_has_no_sharpness(scaler: Any) -> None:
    model = smooth_network()
    opt = wsam.SAM(BASES["sgd"](model.parameters()), rho=0.0)
    wsam.train_step(opt, loss_of(opt, model), scaler=scaler)(*batches()[0])
    assert opt.sharpness == 0


def test_autocast_with_an_empty_group() -> None:
    model = smooth_network()
    base = torch.optim.SGD([{"params": []}, {"params": model.parameters()}], lr=0.1)
    opt = wsam.SAM(base)
    loss, _ = wsam.train_step(opt, loss_of(opt, model), autocast=torch.bfloat16)(*batches()[0])
    assert loss.isfinite()


def test_a_disabled_scaler_is_ignored() -> None:
    model = smooth_network()
    opt = wsam.SAM(BASES["sgd"](model.parameters()))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss, _ = wsam.train_step(opt, loss_of(opt, model), scaler=scaler)(*batches()[0])
    assert loss.isfinite()
    assert opt.sharpness > 0


@pytest.mark.parametrize("bad_pass", [1, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_an_exception_restores_the_weights(scaled: bool, bad_pass: int) -> None:
    model = smooth_network()
    opt = wsam.WSAM(BASES["sgd"](model.parameters()))
    fails, passes = True, 0

    def loss_fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal passes
        passes += 1
        if fails and passes == bad_pass:
            raise KeyboardInterrupt
        return loss_of(opt, model)(x, y)

    step = wsam.train_step(opt, loss_fn, scaler=new_scaler() if scaled else None)
    before = snapshot(opt)
    with pytest.raises(KeyboardInterrupt):
        step(*batches()[0])
    assert same(snapshot(opt), before)
    fails = False
    step(*batches()[0])
    assert not same(snapshot(opt)["weights"], before["weights"])


def test_an_error_after_unscaling_leaves_the_scaler_usable() -> None:
    model = smooth_network()
    opt = wsam.WSAM(BASES["sgd"](model.parameters()), nonfinite="raise")
    factor, passes = torch.inf, 0

    def loss_fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal passes
        passes += 1
        loss, logits = loss_of(opt, model)(x, y)
        return loss * (factor if passes == 2 else 1.0), logits

    step = wsam.train_step(opt, loss_fn, scaler=new_scaler())
    with pytest.raises(FloatingPointError):
        step(*batches()[0])
    before = snapshot(opt)
    step(*batches()[0])
    assert not same(snapshot(opt)["weights"], before["weights"])
