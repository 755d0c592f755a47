"""Which base optimizers have a kernel, and when eager steps may use it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import wsam
from wsam._core.param_groups import rule_values
from wsam.accel.base_optimizers import (
    branches_of,
    has_kernel,
    may_use_kernels,
    mix_on_host,
    numbers_of,
)


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2))]


def test_bases_that_have_a_kernel() -> None:
    assert has_kernel(torch.optim.SGD(weights(), lr=0.1))
    assert has_kernel(torch.optim.Adam(weights()))
    assert not has_kernel(torch.optim.SGD(weights(), lr=0.1, maximize=True))
    assert not has_kernel(torch.optim.Adam(weights(), amsgrad=True))
    assert not has_kernel(torch.optim.RMSprop(weights()))
    betas = (torch.tensor(0.9), torch.tensor(0.999))
    assert not has_kernel(torch.optim.Adam(weights(), betas=betas, capturable=True))


def test_hooks_disable_the_kernel() -> None:
    hooked = torch.optim.SGD(weights(), lr=0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    assert not has_kernel(hooked)
    base = torch.optim.SGD(weights(), lr=0.1)
    handle = register_optimizer_step_post_hook(lambda *_: None)  # of all optimizers
    try:
        assert not has_kernel(base)
    finally:
        handle.remove()
    assert has_kernel(base)


def test_scheduled_values_are_no_compile_time_constants() -> None:
    base = torch.optim.SGD(weights(), lr=0.1, momentum=0.9, weight_decay=0.1)
    opt = wsam.WSAM(base)
    group = base.param_groups[0]
    branches, numbers = (
        branches_of(base, group),
        numbers_of(group, mix_on_host(rule_values(group, opt.rule), opt.rule, reuses=False), 1.0),
    )
    group.update(momentum=0.8, weight_decay=0.2, lr=0.3, sam_rho=0.4, sam_gamma=0.5)
    assert branches_of(base, group) == branches
    changed = numbers_of(
        group, mix_on_host(rule_values(group, opt.rule), opt.rule, reuses=False), 1.0
    )
    assert [changed[i] != numbers[i] for i in (0, 4, 5, 6, 7)] == [True] * 5


@pytest.mark.parametrize(
    ("make", "options", "allowed"),
    [
        (torch.optim.SGD, {}, True),
        (torch.optim.SGD, {"fused": True}, True),
        (torch.optim.SGD, {"fused": False}, False),
        (torch.optim.SGD, {"foreach": True}, False),
        (torch.optim.SGD, {"foreach": False}, False),
        (torch.optim.SGD, {"differentiable": True}, False),
        (torch.optim.Adam, {}, False),  # its step counts are on the host
        (torch.optim.Adam, {"capturable": True}, True),
        (torch.optim.AdamW, {"fused": True}, True),
    ],
)
def test_the_users_choice_of_implementation_is_respected(
    make: Any, options: dict[str, bool], allowed: bool
) -> None:
    opt = wsam.CoupledWSAM(make(weights(), lr=0.1, **options))
    assert may_use_kernels(opt.base, opt.rule) is allowed


@pytest.mark.parametrize("key", ["lr", "sam_rho", "sam_gamma"])
def test_hyperparameters_in_tensors_disable_eager_kernels(key: str) -> None:
    opt = wsam.WSAM(torch.optim.SGD(weights(), lr=0.1))
    opt.param_groups[0][key] = torch.tensor(0.1)
    assert not may_use_kernels(opt.base, opt.rule)


def test_a_replaced_step_disables_eager_kernels() -> None:
    """Even if it has the mark by which schedulers recognize their own wrapper."""
    base = torch.optim.SGD(weights(), lr=0.1)
    own = base.step

    def step(*given: Any) -> Any:
        return own(*given)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    base.step = step  # type: ignore[method-assign]
    assert not may_use_kernels(base, wsam.rule.Weighted())
