"""The first gradient survives the second backward pass, even in storage that is reused."""

import pytest
import torch
from helpers import PROBLEMS, parameters
from torch import Tensor

import wsam
from wsam._core.step import owned


@pytest.mark.parametrize(
    "view",
    [torch.zeros(4).view(2, 2), torch.zeros(8)[:4].detach()],
    ids=["of a whole storage", "of a part"],
)
def test_gradients_that_are_views_are_copied(view: Tensor) -> None:
    whole = torch.zeros(3)
    kept = owned([whole, view], sharded=False)
    assert kept[0] is whole
    assert kept[1].data_ptr() != view.data_ptr()


@pytest.mark.parametrize("method", ["wsam", "sam", "gsam"])
def test_gradients_in_a_reused_bucket(method: str) -> None:
    """DistributedDataParallel with `gradient_as_bucket_view=True` writes both passes to one bucket."""
    problem, found = PROBLEMS["mlp"], []
    for in_bucket in (True, False):
        params = parameters(problem.weights())
        opt = wsam.create(method, torch.optim.SGD(params, lr=0.02, momentum=0.9), rho=0.5)
        bucket = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
        views = [part.view_as(p) for part, p in zip(_split(bucket, params), params, strict=True)]

        def closure(t: int, params=params, views=views, in_bucket=in_bucket) -> Tensor:
            loss = problem.losses(params, t).mean()
            gradients = torch.autograd.grad(loss, params)
            for p, g, view in zip(params, gradients, views, strict=True):
                p.grad = view.copy_(g) if in_bucket else g
            return loss

        for t in range(3):
            opt.step(lambda t=t, run=closure: run(t))
        found.append(params)
    assert all(map(torch.equal, *found))


def _split(bucket: Tensor, params: list[Tensor]) -> tuple[Tensor, ...]:
    return bucket.split([p.numel() for p in params])
