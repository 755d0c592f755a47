"""
Schedules of gamma and rho
==========================

A hyperparameter is a number or a schedule. ``param_groups`` contains the current value for each group.
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
    recorded = []

    def closure():
        loss = w.square().sum()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
        recorded.append(float(optimizer.param_groups[0][key]))
        scheduler.step()
    return recorded


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.plot(values(lambda base: WSAM(base, gamma=Warmup(0.9, steps=40)), "sam_gamma"))
left.set(title="gamma: Warmup(0.9, steps=40)", xlabel="step", ylabel="gamma")
decreasing = values(lambda base: WSAM(base, rho=InverseSqrt(0.1)), "sam_rho")
right.plot(decreasing, label="InverseSqrt(0.1)")
scaled = values(lambda base: GSAM(base, rho=0.1, rho_min=0.02), "sam_rho")
right.plot(scaled, label="GSAM, rho_min=0.02: scaled with the learning rate")
right.set(title="rho", xlabel="step", ylabel="rho", ylim=(0, 0.15))
right.legend()
plt.show()
