"""Losses along directions, and the directions themselves."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from wsam.curvature import (
    between,
    hessian,
    landscape,
    normalised,
    random_direction,
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


def loss_after_moving(model: nn.Module, *steps: tuple[float, dict[str, torch.Tensor]]) -> float:
    """Return the loss after changing the weights in place."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for amount, direction in steps:
            for name, p in model.named_parameters():
                p.add_(amount * direction[name])
        value = loss_of(model)
        for name, p in model.named_parameters():
            p.copy_(before[name])
    return value


def test_lines_and_planes_equal_the_losses_of_moved_weights():
    model = net()
    a, b = random_direction(model, seed=1), random_direction(model, seed=2)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    line = landscape(model, F.cross_entropy, DATA, a, [-0.5, 0.0, 1.0])
    plane = landscape(model, F.cross_entropy, DATA, [a, b], [[-0.5, 1.0], [0.0, 0.3, 2.0]])
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert line.losses == pytest.approx(
        [loss_after_moving(model, (t, a)) for t in (-0.5, 0.0, 1.0)], rel=1e-5
    )
    for i, s in enumerate((-0.5, 1.0)):
        expected = [loss_after_moving(model, (s, a), (t, b)) for t in (0.0, 0.3, 2.0)]
        assert plane.losses[i] == pytest.approx(expected, rel=1e-5)
    assert (line.dimensions, plane.dimensions) == (1, 2)
    assert line.info["mode"] == "eval"
    assert len(landscape(model, F.cross_entropy, DATA, a).losses) == 41


def test_given_statistics_do_not_change_in_train_mode():
    """BatchNorm updates its running statistics, also those of `origin`."""
    model = net()
    origin = model.state_dict()  # shares memory with the model
    before = {name: tensor.clone() for name, tensor in origin.items()}
    line = landscape(
        model, F.cross_entropy, DATA, random_direction(model), [0.0], origin=origin, mode="train"
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in origin.items())
    with torch.no_grad():
        total = sum(len(x) * float(F.cross_entropy(model.train()(x), y)) for x, y in DATA)
    assert line.losses == pytest.approx([total / 10], rel=1e-5)


def test_directions_have_the_norms_of_filters_or_length_one():
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
    diverged = {"4.weight": torch.full((3, 8), torch.nan)}
    assert normalised(model, diverged)["4.weight"].isnan().all(), "no error about tied weights"
    with pytest.raises(ValueError, match="normalise must be"):
        normalised(model, direction, "layer")
    with pytest.raises(ValueError, match="direction of zeros"):
        normalised(model, {"4.bias": torch.zeros(3)}, "unit")
    with pytest.raises(ValueError, match="no parameters"):
        random_direction(nn.ReLU())


def test_directions_of_wrapped_models_and_between_checkpoints():
    model = net()
    expected = landscape(model, F.cross_entropy, DATA, random_direction(model), [0.5]).losses
    for wrapped in (torch.compile(model), nn.DataParallel(model)):
        direction = normalised(wrapped, random_direction(wrapped))
        assert landscape(wrapped, F.cross_entropy, DATA, direction, [0.5]).losses == expected
    _, direction = between(model.state_dict(), net().state_dict())
    scaled = normalised(model, direction)
    torch.testing.assert_close(scaled["4.weight"].norm(dim=1), model[4].weight.norm(dim=1))
    assert not scaled["1.running_var"].any()


def test_frozen_models_and_progress():
    model, reports = net(), []
    a = random_direction(model)
    expected = landscape(model, F.cross_entropy, DATA, a, [0.0, 1.0])
    model.requires_grad_(False)
    found = landscape(model, F.cross_entropy, DATA, a, [0.0, 1.0], report=reports.append)
    assert found == expected
    assert [at[:2] for at in reports] == [(n, 4) for n in (1, 2, 3, 4)], "2 points, 2 batches"


def test_default_coordinates_are_symmetric_around_zero():
    model = nn.Linear(1, 1, bias=False)
    a, b = ({"weight": torch.full((1, 1), size)} for size in (1.0, 2.0))
    for directions, points in ((a, 41), ([a, b], 21)):
        found = landscape(model, F.mse_loss, [(torch.ones(1, 1), torch.ones(1, 1))], directions)
        for axis in found.coordinates:
            assert len(axis) == points
            assert axis[0] == -1
            assert axis[points // 2] == 0
            assert axis == [-value for value in reversed(axis)]


def test_coordinates_may_be_arrays():
    model, direction = net(), random_direction(net())
    expected = landscape(model, F.cross_entropy, DATA, direction, [-1.0, 0.0, 1.0]).losses
    axis = torch.linspace(-1, 1, 3)
    for given in (axis, axis.numpy(), [axis], [axis.numpy()], axis[None]):
        found = landscape(model, F.cross_entropy, DATA, direction, given)
        assert (found.coordinates, found.losses) == ([[-1.0, 0.0, 1.0]], expected)


def test_curvature_along_an_eigenvector_is_its_eigenvalue():
    model = net().double()
    data = [(x.double(), y) for x, y in DATA]
    H = hessian(model, F.cross_entropy, data)
    found = top_eigenvalues(H, 1, tol=1e-8)
    h = 1e-4
    line = landscape(model, F.cross_entropy, data, H.split(found.vectors[:, 0]), [-h, 0.0, h])
    low, middle, high = line.losses
    assert (low - 2 * middle + high) / h**2 == pytest.approx(found.largest, rel=1e-4)


def test_line_between_checkpoints_includes_batchnorm_statistics():
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
    with pytest.raises(ValueError, match=r"only one has a tensor '4.bias' of shape \(3,\)"):
        between(first.state_dict(), other)


class Tied(nn.Module):
    """One weight with two names, as embedding and head of a language model."""

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
    different = {**direction, "b.weight": direction["b.weight"] + 1}
    with pytest.raises(ValueError, match=r"'a\.weight' and 'b\.weight' are one tensor"):
        landscape(model, F.cross_entropy, DATA, different, [0.0])


def test_note_counts_points_without_a_finite_loss():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    data = [(torch.ones(2, 1), torch.ones(2, 1))]
    line = {"1.running_var": torch.ones(1)}  # from 1, so the variance is negative below -1
    found = landscape(model, F.mse_loss, data, line, [-3.0, -2.0, 0.0])
    assert [math.isfinite(loss) for loss in found.losses] == [False, False, True]
    reason = "a variance of BatchNorm is negative"
    assert found.note == f"2 of 3 points have no finite loss ({reason} there)"
    both = [line, {"1.bias": torch.ones(1)}]
    plane = landscape(model, F.mse_loss, data, both, [[-2.0, 0.0], [0.0, 1e30]])
    assert plane.note == f"3 of 4 points have no finite loss ({reason} at 2 of them)"
    far = landscape(model, F.mse_loss, data, both[1], [0.0, 1e30])
    assert far.note == "1 of 2 points has no finite loss"
    assert math.isinf(far.losses[1])
    assert far.as_dict()["losses"][1] is None
    assert landscape(model, F.mse_loss, data, line, [0.0]).note == ""
    # In train mode BatchNorm does not use the running variances.
    train = landscape(model, F.mse_loss, data, both, [[-2.0], [1e30]], mode="train")
    assert train.note == "1 of 1 points has no finite loss"


def test_invalid_arguments():
    model = net()
    for directions in ([], [random_direction(model)] * 3):
        with pytest.raises(ValueError, match="one direction or two, got"):
            landscape(model, F.cross_entropy, DATA, directions)
    with pytest.raises(ValueError, match=r"'4\.bias' is of shape"):
        landscape(model, F.cross_entropy, DATA, {"4.bias": torch.ones(4)}, [0.0])
    first, second = random_direction(model), random_direction(model, seed=1)
    wrong = [(first, []), (first, [[0.0], [1.0]]), ([first, second], [0.0, 1.0])]
    for directions, coordinates in wrong:
        with pytest.raises(ValueError, match="a list for each of the directions"):
            landscape(model, F.cross_entropy, DATA, directions, coordinates)
