"""
Schedules of gamma and rho
==========================

A hyperparameter may be a number or a schedule. The current value of each group lies in
``param_groups``, so that it can be logged.
"""

import matplotlib.pyplot as plt
import torch

from wsam import GSAM, WSAM
from wsam.schedule import InverseSqrt, Warmup

STEPS = 100


def values(make, key: str) -> list[float]:
    w = torch.ones(2, requires_grad=True)
    optimizer = make(torch.optim.SGD([w], lr=0.1))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    seen = []

    def closure():
        loss = w.square().sum()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
        seen.append(float(optimizer.param_groups[0][key]))
        scheduler.step()
    return seen


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.plot(values(lambda base: WSAM(base, gamma=Warmup(0.9, steps=40)), "sam_gamma"))
left.set(title="gamma: Warmup(0.9, steps=40)", xlabel="step", ylabel="gamma")
falling = values(lambda base: WSAM(base, rho=InverseSqrt(0.1)), "sam_rho")
right.plot(falling, label="InverseSqrt(0.1)")
following = values(lambda base: GSAM(base, rho=0.1, rho_min=0.02), "sam_rho")
right.plot(following, label="GSAM, rho_min=0.02: follows the learning rate")
right.set(title="rho", xlabel="step", ylabel="rho", ylim=(0, 0.15))
right.legend()
plt.show()
