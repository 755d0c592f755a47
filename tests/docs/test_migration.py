"""docs/migration.md: old and new lines run, and train to the same weights where they should.

Each line of the page's table of differences names a test of this file, which runs both libraries.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer as peer
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import wsam

PAGE = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
SGD = {"lr": 0.1, "momentum": 0.9}
Closure = Callable[[], Tensor]


def rows(title: str) -> list[tuple[str, str, str]]:
    """Return the rows of the table below a title: topic, old code, new code."""
    table = PAGE.split(f"## {title}\n\n")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip("` ") for cell in line.split("|")[1:-1]] for line in table]
    return [(topic, old, new) for topic, old, new in cells]


def make_model(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *layers, nn.ReLU(), nn.Linear(16, 3))


def make_closure(model: nn.Module, optimizer: Any) -> Closure:
    torch.manual_seed(1)
    x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def names_of_page(model: nn.Module) -> dict[str, Any]:
    head = re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(head.group(1), names)  # type: ignore[union-attr]
    return {**names, "model": model, "base": torch.optim.SGD(model.parameters(), **SGD)}


def test_lines_from_davda54_run_in_order() -> None:
    model = make_model(nn.BatchNorm1d(16))
    names = names_of_page(model)
    before = weights(model)
    made = rows("From davda54/sam")
    assert len(made) == 10
    for _, _, new in made:
        exec(new, names)
    assert not torch.equal(weights(model), before)
    assert model[1].num_batches_tracked == 1


LINES = [row for row in rows("From pytorch_optimizer") if not row[0].startswith("a step")]


@pytest.mark.parametrize(("topic", "old", "new"), LINES, ids=[row[0] for row in LINES])
def test_lines_from_pytorch_optimizer_agree(topic: str, old: str, new: str) -> None:
    """Old and new line train to the same weights, up to rounding."""
    steps = {topic: (old, new) for topic, old, new in rows("From pytorch_optimizer")}
    old_step, new_step = steps["a step of SAM" if "SAM(model.p" in old else "a step of WSAM"]
    ends = []
    for line, step, library in ((old, old_step, vars(peer)), (new, new_step, {})):
        model = make_model().double()
        names = {**names_of_page(model), **library, "model": model}
        code = line if library == {} else f"optimizer = {line}"
        exec(code, names)
        model.register_forward_pre_hook(lambda _, given: given[0].double())
        names["closure"] = make_closure(model, names["optimizer"])
        for _ in range(5):
            exec(step, names)
        ends.append(weights(model))
    assert torch.allclose(*ends, rtol=0, atol=1e-9)
    assert not torch.allclose(ends[0], weights(make_model().double()), atol=1e-3)


# Differences ------------------------------------------------------------------------------------


def pair(kind: str, *layers: Callable[[], nn.Module], **hyper: Any) -> list[tuple[nn.Module, Any]]:
    """Return equal models, one with pytorch_optimizer's optimizer and one with ours."""
    made = []
    for ours in (False, True):
        model = make_model(*(layer() for layer in layers))
        base = torch.optim.SGD(model.parameters(), **SGD)
        if ours:
            optimizer: Any = wsam.create(kind.lower(), base, **hyper)
        elif kind == "SAM":
            optimizer = peer.SAM(model.parameters(), torch.optim.SGD, **hyper, **SGD)
        else:
            optimizer = peer.WSAM(model, model.parameters(), torch.optim.SGD, **hyper, **SGD)
        made.append((model, optimizer))
    return made


def test_return_to_w() -> None:
    """With a learning rate of zero a step changes no weight if the return to w is exact."""
    changed = []
    for model, optimizer in pair("WSAM", rho=0.5, gamma=0.9):
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        before = weights(model)
        optimizer.step(make_closure(model, optimizer))
        changed.append(int((weights(model) != before).sum()))
    assert changed[0] > 0
    assert changed[1] == 0


def test_batchnorm() -> None:
    counts = []
    for model, optimizer in pair("SAM", lambda: nn.BatchNorm1d(16), rho=0.05):
        closure = make_closure(model, optimizer)
        if isinstance(optimizer, peer.SAM):
            closure()
        optimizer.step(closure)
        counts.append(int(model[1].num_batches_tracked))
    assert counts == [2, 1]


def test_dropout() -> None:
    same = []
    for model, optimizer in pair("WSAM", nn.Dropout, rho=0.05, gamma=0.9):
        masks: list[Tensor] = []
        model[1].register_forward_hook(lambda _, __, out, seen=masks: seen.append(out == 0))
        optimizer.step(make_closure(model, optimizer))
        same.append(torch.equal(*masks))
    assert same == [False, True]


def test_exception() -> None:
    back = []
    for model, optimizer in pair("WSAM", rho=0.05, gamma=0.9):
        inner, before = make_closure(model, optimizer), weights(model)

        def closure(inner=inner, model=model, before=before) -> Tensor:
            if not torch.equal(weights(model), before):
                raise RuntimeError("second pass")
            return inner()

        with pytest.raises(RuntimeError, match="second pass"):
            optimizer.step(closure)
        back.append(torch.equal(weights(model), before))
    assert back == [False, True]


def test_first_pass() -> None:
    """With only a closure, SAM of pytorch_optimizer steps like the plain base."""
    plain = make_model()
    base = torch.optim.SGD(plain.parameters(), **SGD)
    base.step(make_closure(plain, base))
    as_plain = []
    for model, optimizer in pair("SAM", rho=0.5):
        optimizer.step(make_closure(model, optimizer))
        as_plain.append(torch.allclose(weights(model), weights(plain), atol=1e-7))
    assert as_plain == [True, False]


def test_returned_loss() -> None:
    returned = []
    for model, optimizer in pair("SAM", rho=0.05):
        closure = make_closure(model, optimizer)
        first = closure().detach()
        returned.append((optimizer.step(closure), first))
    assert returned[0][0] is None
    assert returned[1][0] == returned[1][1]


def test_clipping() -> None:
    """Clipping must not change the direction of a step."""
    cosines = []
    for ours in (0, 1):
        moves = []
        for max_norm in (None, 0.01):
            hyper = {"rho": 0.05, "gamma": 0.9, "max_norm": max_norm}
            model, optimizer = pair("WSAM", **hyper)[ours]
            before = weights(model)
            optimizer.step(make_closure(model, optimizer))
            moves.append(weights(model) - before)
        cosines.append(torch.cosine_similarity(*moves, dim=0).item())
    assert cosines[0] < 0
    assert cosines[1] == pytest.approx(1, abs=1e-4)


def test_page_names_tests_that_exist() -> None:
    table = PAGE.split("<!-- claims: tests/docs/test_migration.py -->")[1].split("<!-- end -->")[0]
    claims = table.strip().splitlines()[2:]
    named = [re.findall(r"`(test_\w+)` \|$", line) for line in claims]
    assert all(len(names) == 1 for names in named)
    assert {names[0] for names in named} <= set(globals())
