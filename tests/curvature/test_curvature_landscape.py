"""Slices of the loss: right numbers, directions with the right sizes, pictures and pages."""

import json
import math

import pytest
import torch
from browsing import needs_browser, running
from torch import nn
from torch.nn import functional as F

from wsam.curvature import (
    Landscape,
    between,
    density,
    hessian,
    landscape,
    normalised,
    random_direction,
    save_density,
    top_eigenvalues,
)


def net() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    )
    model(torch.randn(20, 1, 3, 3))
    return model


X, Y = torch.randn(10, 1, 3, 3), torch.arange(10) % 3
DATA = [(X[:7], Y[:7]), (X[7:], Y[7:])]


def loss_of(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float(F.cross_entropy(model(X), Y))


def moved(model: nn.Module, *steps: tuple[float, dict[str, torch.Tensor]]) -> float:
    """The loss after really moving the weights."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for amount, direction in steps:
            for name, p in model.named_parameters():
                p.add_(amount * direction[name])
        value = loss_of(model)
        for name, p in model.named_parameters():
            p.copy_(before[name])
    return value


def test_lines_and_planes_hold_the_losses_of_moved_weights():
    model = net()
    a, b = random_direction(model, seed=1), random_direction(model, seed=2)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    line = landscape(model, F.cross_entropy, DATA, a, [-0.5, 0.0, 1.0])
    plane = landscape(model, F.cross_entropy, DATA, [a, b], [[-0.5, 1.0], [0.0, 0.3, 2.0]])
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert line.losses == pytest.approx([moved(model, (t, a)) for t in (-0.5, 0.0, 1.0)], rel=1e-5)
    for i, s in enumerate((-0.5, 1.0)):
        expected = [moved(model, (s, a), (t, b)) for t in (0.0, 0.3, 2.0)]
        assert plane.losses[i] == pytest.approx(expected, rel=1e-5)
    assert (line.dimensions, plane.dimensions) == (1, 2)
    assert line.info["mode"] == "eval"
    assert len(landscape(model, F.cross_entropy, DATA, a).losses) == 41


def test_directions_have_the_sizes_of_filters_or_length_one():
    model = net()
    direction = random_direction(model, seed=3)
    conv, linear = model[0].weight.detach(), model[4].weight.detach()
    torch.testing.assert_close(
        direction["0.weight"].flatten(1).norm(dim=1), conv.flatten(1).norm(dim=1)
    )
    torch.testing.assert_close(direction["4.weight"].norm(dim=1), linear.norm(dim=1))
    assert not any(direction[name].any() for name in ("0.bias", "1.weight", "1.bias", "4.bias"))
    again = random_direction(model, seed=3)
    assert all(torch.equal(direction[name], again[name]) for name in direction)
    unit = random_direction(model, normalise="unit")
    assert sum(float((d**2).sum()) for d in unit.values()) == pytest.approx(1, rel=1e-5)
    with pytest.raises(ValueError, match="normalise must be"):
        normalised(model, direction, "layer")
    with pytest.raises(ValueError, match="no length"):
        normalised(model, {"4.bias": torch.zeros(3)}, "unit")
    with pytest.raises(ValueError, match="no parameters"):
        random_direction(nn.ReLU())


def test_along_an_eigenvector_the_curvature_is_its_eigenvalue():
    model = net().double()
    data = [(x.double(), y) for x, y in DATA]
    H = hessian(model, F.cross_entropy, data)
    found = top_eigenvalues(H, 1, tol=1e-8)
    h = 1e-4
    line = landscape(model, F.cross_entropy, data, H.split(found.vectors[:, 0]), [-h, 0.0, h])
    low, middle, high = line.losses
    assert (low - 2 * middle + high) / h**2 == pytest.approx(found.largest, rel=1e-4)


def test_between_two_checkpoints_batchnorm_statistics_included():
    first, second = net(), net()
    origin, direction = between(first.state_dict(), second.state_dict())
    line = landscape(net(), F.cross_entropy, DATA, direction, [0.0, 0.5, 1.0], origin=origin)
    assert line.losses[0] == pytest.approx(loss_of(first), rel=1e-5)
    assert line.losses[2] == pytest.approx(loss_of(second), rel=1e-5)
    assert "1.running_var" in direction
    assert "1.num_batches_tracked" not in direction
    with pytest.raises(ValueError, match="only one has"):
        between(first.state_dict(), nn.Linear(2, 2).state_dict())
    other = {**second.state_dict(), "4.bias": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"'4.bias' is \(3,\) in one and \(4,\)"):
        between(first.state_dict(), other)


class Tied(nn.Module):
    """A layer that goes by two names, as the embedding and the head of a language model do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x.flatten(1)[:, :3])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tied_weights_move_together(dtype):
    model, first, second = Tied(), Tied(), Tied()
    origin, direction = between(first.state_dict(), second.state_dict())
    assert {"a.weight", "b.weight"} <= direction.keys()
    line = landscape(
        model, F.cross_entropy, DATA, direction, [0.0, 1.0], origin=origin, dtype=dtype
    )
    assert line.losses == pytest.approx([loss_of(first), loss_of(second)], rel=1e-5)
    half = landscape(
        first, F.cross_entropy, DATA, {"b.weight": direction["b.weight"]}, [0.5], dtype=dtype
    )
    with torch.no_grad():
        first.a.weight.add_(0.5 * direction["a.weight"])
    assert half.losses == pytest.approx([loss_of(first)], rel=1e-5)
    unit = normalised(model, {name: direction[name] for name in ("a.weight", "b.weight")}, "unit")
    assert {name: float(d.norm()) for name, d in unit.items()} == {"a.weight": pytest.approx(1)}
    assert normalised(model, {"b.weight": direction["b.weight"]})["a.weight"].shape == (3, 3)
    apart = {**direction, "b.weight": direction["b.weight"] + 1}
    with pytest.raises(ValueError, match=r"'a\.weight' and 'b\.weight' are one tensor"):
        landscape(model, F.cross_entropy, DATA, apart, [0.0])


def test_losses_that_are_not_finite_are_kept_and_written_as_null(tmp_path):
    model = nn.Linear(1, 1, bias=False)
    far = landscape(
        model,
        F.mse_loss,
        [(torch.ones(1, 1), torch.ones(1, 1))],
        {"weight": torch.ones(1, 1)},
        [0.0, 1e30],
    )
    assert math.isinf(far.losses[1])
    saved = json.loads(far.save(tmp_path / "far.json").read_text())
    assert saved["losses"][1] is None
    for name in ("far.png", "far.html"):
        assert far.save(tmp_path / name).stat().st_size > 1000


def test_wrong_slices():
    model = net()
    a = random_direction(model)
    with pytest.raises(ValueError, match="one direction or two, not 3"):
        landscape(model, F.cross_entropy, DATA, [a, a, a])
    with pytest.raises(ValueError, match="coordinates"):
        landscape(model, F.cross_entropy, DATA, [a, a], [[0.0, 1.0]])
    with pytest.raises(ValueError, match="no parameter or buffer named 'x'"):
        landscape(model, F.cross_entropy, DATA, {"x": torch.ones(1)}, [0.0])
    with pytest.raises(ValueError, match=r"'4\.bias' is of shape"):
        landscape(model, F.cross_entropy, DATA, {"4.bias": torch.ones(4)}, [0.0])


def surfaces():
    model = net()
    a, b = random_direction(model, seed=1), random_direction(model, seed=2)
    line = landscape(model, F.cross_entropy, DATA, a, labels=["</script><b>x</b>"])
    plane = landscape(
        model, F.cross_entropy, DATA, [a, b], [[-1.0, 0.0, 1.0], [-1.0, -0.5, 0.5, 1.0]]
    )
    return line, plane, density(hessian(model, F.cross_entropy, DATA), steps=10, max_probes=3)


def test_pictures_and_refusals(tmp_path):
    line, plane, spectrum = surfaces()
    for index, picture in enumerate((line, plane)):
        for log in (False, True):
            path = picture.save(tmp_path / f"{index}{log}.png", log=log)
            assert path.read_bytes().startswith(b"\x89PNG")
    save_density(spectrum, tmp_path / "density.svg", marks=[1.0])
    assert "<svg" in (tmp_path / "density.svg").read_text()
    with pytest.raises(ValueError, match="must end in"):
        line.save(tmp_path / "line.gif")


def test_pages_need_no_network_and_cannot_be_broken_out_of(tmp_path):
    line, _, _ = surfaces()
    page = line.save(tmp_path / "line.html").read_text()
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "<b>x</b>" not in page
    assert page.count("</script>") == 2


@needs_browser
@pytest.mark.browser
def test_pages_draw_and_answer_in_a_browser(tmp_path):
    line, plane, spectrum = surfaces()
    line.save(tmp_path / "line.html")
    plane.save(tmp_path / "plane.html")
    save_density(spectrum, tmp_path / "density.html", marks=[0.5])
    with running() as browser:
        page = browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        for name in ("line", "density"):
            page.goto((tmp_path / f"{name}.html").as_uri())
            curve = page.locator("path.line")
            before = curve.get_attribute("d")
            assert before.count("L") >= 40
            page.locator("#log").click()
            assert curve.get_attribute("d") != before
            page.locator("svg").hover(position={"x": 300, "y": 100})
            assert page.locator("#read").text_content()
        assert page.locator("#scale").text_content().startswith("Band: within two standard errors.")
        lost = Landscape([[0.0, 1.0, 2.0]], [1.0, 2.0, math.nan], ["x"], note="1 is lost")
        page.goto(lost.save(tmp_path / "lost.html").as_uri())
        assert page.locator("text.gap").count() == 1
        assert "A cross: no finite loss" in page.locator("#scale").text_content()
        assert page.locator("#note").text_content() == "1 is lost"
        page.goto((tmp_path / "plane.html").as_uri())
        picture = "i => document.querySelectorAll('canvas')[i].toDataURL()"
        still, turned = (page.evaluate(picture, i) for i in (0, 1))
        page.locator("canvas").nth(1).press("ArrowLeft")
        assert page.evaluate(picture, 1) != turned
        assert page.evaluate(picture, 0) == still
        page.locator("canvas").nth(0).hover(position={"x": 1, "y": 1})
        assert "direction 1 -1, direction 2 1: loss" in page.locator("#read").text_content()
    assert problems == []
