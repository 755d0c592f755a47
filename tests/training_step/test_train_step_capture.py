"""`capture=` of `train_step`: the same numbers from a CUDA graph, or the reason why there is none."""

import copy
import logging
import random
import re
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import wsam
from wsam.accel import step_capture
from wsam.schedule import Every

LOGGER = "wsam.accel.step_capture"


# --- On a CPU: with a stand-in for the graph --------------------------------------------------------


class EagerGraph:
    """Makes each step eagerly, as a graph does in its first calls."""

    def __init__(self, opt: Any, make_step: Any) -> None:
        self.make_step, self.is_last_eager_call = make_step, True
        self.batches: list[Any] = []

    def __len__(self) -> int:
        return len({tuple(x.shape) for batch in self.batches for x in batch})

    def run(self, leaves: Any, structure: Any) -> tuple[Tensor, Any]:
        self.batches.append(leaves)
        return self.make_step(*leaves)


class Meta(Tensor):
    """A tensor that claims to be on a CUDA device."""

    is_cuda = True


def on_cuda(*size: int) -> Tensor:
    return torch.ones(size).as_subclass(Meta)


@pytest.fixture
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wsam.training_step.TrainStep._is_on_cuda", lambda self: True)
    monkeypatch.setattr(step_capture, "GraphedStep", EagerGraph)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what `train_step` has logged."""
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def make(
    capture: Any = "auto",
    *,
    plain: bool = False,
    pass_model: bool = True,
    draw: Any = None,
    **options,
) -> Any:
    model = nn.Linear(3, 1)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = base if plain else wsam.SAM(base, model=model if pass_model else None)

    def loss_fn(x: Any) -> Tensor:
        factor = draw() if draw is not None else 1.0
        x = x["x"] if isinstance(x, UserDict) else x
        return factor * model(x.as_subclass(Tensor)).square().mean()

    return wsam.train_step(opt, loss_fn, capture=capture, **options)


def test_auto_is_silent_on_a_cpu(caplog: pytest.LogCaptureFixture, recwarn: Any) -> None:
    step = make()
    for _ in range(4):
        step(torch.ones(4, 3))
    assert not messages(caplog)
    assert not recwarn.list


def test_auto_uses_the_graph(pretend_cuda: None, caplog: pytest.LogCaptureFixture) -> None:
    step = make()
    for _ in range(4):
        step(on_cuda(4, 3))
    assert len(step._step_capture.graph.batches) == 4
    assert not messages(caplog)


def test_no_graph_if_false(pretend_cuda: None) -> None:
    step = make(capture=False)
    step(on_cuda(4, 3))
    assert step._step_capture is None


@pytest.mark.parametrize(
    ("options", "batch", "reason"),
    [
        ({}, torch.ones(4, 3), "the batch must consist of .*CUDA tensors"),
        ({"pass_model": False}, on_cuda(4, 3), "the model is unknown.*model="),
        ({}, UserDict(x=on_cuda(4, 3)), "the batch must consist of numbers"),
        ({"plain": True}, on_cuda(4, 3), "the model is unknown.*model="),
        ({"scaler": torch.amp.GradScaler("cpu")}, on_cuda(4, 3), "GradScaler reads its scale"),
        ({"draw": lambda: torch.rand(())}, on_cuda(4, 3), "random numbers from torch"),
    ],
)
def test_auto_logs_once_why_it_is_eager(
    pretend_cuda: None, caplog: pytest.LogCaptureFixture, options: Any, batch: Any, reason: str
) -> None:
    step = make(**options)
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(3):
            step(batch)
    (message,) = messages(caplog)
    assert message.startswith("train_step makes eager steps: ")
    assert re.search(reason, message)
    assert step._step_capture.graph is None


def test_auto_logs_why_the_optimizer_cannot_be_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("wsam.training_step.TrainStep._is_on_cuda", lambda self: True)
    step = make()
    step(on_cuda(4, 3))
    (message,) = messages(caplog)
    assert "needs all parameters on one CUDA device" in message


def test_auto_gives_up_where_shapes_do_not_repeat(
    pretend_cuda: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_capture, "RECORDINGS", 3)
    step = make()
    for size in range(1, 6):
        step(on_cuda(size, 3))
    (message,) = messages(caplog)
    assert "3 different shapes" in message


def test_true_raises_if_the_loss_function_works_on_the_host(pretend_cuda: None) -> None:
    step = make(capture=True, draw=random.random)
    with pytest.raises(ValueError, match=r"cannot be captured: .*random numbers.*capture=False"):
        step(on_cuda(4, 3))


# --- On CUDA ---------------------------------------------------------------------------------------

STEPS = 8
BASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, 5)).cuda()


def batches(count: int = STEPS, size: int = 16) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, size, 3, 8, 8, generator=generator).cuda()
    y = torch.randint(0, 5, (count, size), generator=generator).cuda()
    return [{"x": images, "y": labels} for images, labels in zip(x, y, strict=True)]


def loss_of(opt: Any, model: nn.Module) -> Any:
    def loss_fn(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = model(x)
        each = cross_entropy(logits.float(), y, reduction="none")
        loss = opt.select(each) if hasattr(opt, "select") else each.mean()
        return {"loss": loss, "logits": logits, "correct": (logits.argmax(1) == y).sum()}

    return loss_fn


def compare(make: Any, data: Any = None, tolerance: float = 2e-5, **options: Any) -> Any:
    """Train with and without a graph; compare losses, outputs, sharpness, weights, statistics."""
    torch.backends.cudnn.allow_tf32 = False
    models = [network(), network()]
    opts = [make(model) for model in models]
    steps = [
        wsam.train_step(opt, loss_of(opt, model), capture=capture, **options)
        for opt, model, capture in zip(opts, models, (False, True), strict=True)
    ]
    kept = []
    for batch in data or batches():
        (loss, outputs), (other, found) = (step(**batch) for step in steps)
        torch.testing.assert_close(other, loss, rtol=5 * tolerance, atol=tolerance)
        logits = [each["logits"].float() for each in (found, outputs)]
        torch.testing.assert_close(*logits, rtol=50 * tolerance, atol=5 * tolerance)
        kept.append((found, copy.deepcopy(found), opts[1]))
        if isinstance(opts[0], wsam.SharpnessAware):
            values = [opt.sharpness.float().cuda() for opt in opts]
            torch.testing.assert_close(*values, rtol=1e-2, atol=tolerance, equal_nan=True)
    for found, copied, _ in kept:
        torch.testing.assert_close(found, copied, rtol=0, atol=0)  # later steps do not overwrite it
    states = [model.state_dict().values() for model in models]
    for one, two in zip(*states, strict=True):
        torch.testing.assert_close(two, one, rtol=tolerance, atol=tolerance)
    return steps[1]


def recorded(step: Any) -> int:
    return sum(each.graph is not None for each in step._step_capture.graph._recordings.values())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnCuda:
    @pytest.mark.parametrize("base", BASES)
    @pytest.mark.parametrize("method", sorted(wsam.METHODS))
    def test_methods(self, method, base):
        step = compare(lambda m: wsam.create(method, BASES[base](m.parameters()), model=m))
        assert recorded(step) == 1

    @pytest.mark.parametrize("options", [{"max_norm": 0.1}, {"when": Every(2)}, {"lean": True}])
    def test_options(self, options):
        compare(lambda m: wsam.WSAM(BASES["sgd"](m.parameters()), model=m, **options), batches(12))

    def test_ascent_share_with_an_interval(self):
        make = lambda m: wsam.SAM(BASES["sgd"](m.parameters()), model=m, when=Every(2))  # noqa: E731
        step = compare(make, batches(12), ascent_share=0.5)
        assert recorded(step) == 2

    def test_plain_optimizer(self):
        assert recorded(compare(lambda m: BASES["sgd"](m.parameters()))) == 1

    @pytest.mark.parametrize("per_part", [False, True])
    def test_micro_batches(self, per_part):
        options = {"micro_batches": 3, "perturb_per_micro_batch": per_part}
        step = compare(
            lambda m: wsam.WSAM(BASES["sgd"](m.parameters()), model=m), tolerance=1e-4, **options
        )
        assert recorded(step) == 1

    def test_autocast(self):
        make = lambda m: wsam.WSAM(BASES["sgd"](m.parameters()), model=m)  # noqa: E731
        assert recorded(compare(make, tolerance=1e-2, autocast=torch.bfloat16)) == 1

    def test_an_output_that_is_a_parameter(self):
        """It is the value at w, as that of an eager step."""
        model = network()
        opt = wsam.WSAM(BASES["sgd"](model.parameters()), model=model)
        bias, loss_fn = model[-1].bias, loss_of(opt, model)
        step = wsam.train_step(opt, lambda **b: (loss_fn(**b)["loss"], bias), capture=True)
        for batch in batches():
            before = bias.detach().clone()
            assert torch.equal(step(**batch)[1], before)
        assert recorded(step) == 1

    def test_auto_records(self, caplog):
        model, data = network(0.5), batches()
        opt = wsam.WSAM(BASES["sgd"](model.parameters()), model=model)
        step = wsam.train_step(opt, loss_of(opt, model), autocast=torch.bfloat16)
        for batch in data:
            step(**batch)
        assert not messages(caplog)
        assert recorded(step) == 1
        assert opt.param_groups[0]["sam_step"] == STEPS
        assert int(model[1].num_batches_tracked) == STEPS

    def test_auto_finds_item(self, caplog):
        model, data, seen = network(), batches(), []
        opt = wsam.WSAM(BASES["sgd"](model.parameters()), model=model)

        def loss_fn(x, y):
            result = loss_of(opt, model)(x, y)
            seen.append(result["loss"].item())
            return result

        step = wsam.train_step(opt, loss_fn)
        for batch in data:
            step(**batch)
        (message,) = messages(caplog)
        assert "synchronizes with the device" in message
        assert "test_train_step_capture.py, line" in message
        assert len(seen) == 2 * STEPS

    @pytest.mark.parametrize("options", [{"nonfinite": "skip"}])
    def test_auto_is_eager_where_capture_is_refused(self, options, caplog):
        model = network()
        opt = wsam.WSAM(BASES["sgd"](model.parameters()), model=model, **options)
        step = wsam.train_step(opt, loss_of(opt, model))
        for batch in batches(3):
            step(**batch)
        (message,) = messages(caplog)
        assert "nonfinite='skip'" in message
        with pytest.raises(ValueError, match="nonfinite='skip'"):
            wsam.train_step(opt, loss_of(opt, model), capture=True)

    def test_frozen_layers_and_modes(self):
        """As an eager step: the batch norm goes to eval mode, and the first layer is frozen."""
        models = [network(), network()]
        opts = [wsam.WSAM(BASES["sgd"](m.parameters()), model=m) for m in models]
        steps = [
            wsam.train_step(opt, loss_of(opt, model), capture=capture)
            for opt, model, capture in zip(opts, models, (False, "auto"), strict=True)
        ]
        for t, batch in enumerate(batches(15)):
            if t == 5:
                [model[1].eval() for model in models]
            if t == 10:
                [model[0].requires_grad_(False) for model in models]
            for step in steps:
                step(**batch)
        assert recorded(steps[1]) == 3
        for one, two in zip(*(m.state_dict().values() for m in models), strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)

    def test_resume_from_an_eager_run(self):
        """Its state has other options of the base than a captured step needs."""
        data = batches(12)
        models = [network(), network()]
        opts = [wsam.WSAM(BASES["adamw"](m.parameters()), model=m) for m in models]
        eager = wsam.train_step(opts[0], loss_of(opts[0], models[0]), capture=False)
        captured = wsam.train_step(opts[1], loss_of(opts[1], models[1]), capture=True)
        for batch in data[:5]:
            eager(**batch)
            captured(**batch)
        models[1].load_state_dict(models[0].state_dict())
        opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
        for batch in data[5:]:
            eager(**batch)
            captured(**batch)
        for one, two in zip(*(m.state_dict().values() for m in models), strict=True):
            torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)
