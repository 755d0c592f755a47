"""
Schedules of gamma and rho
==========================

A hyperparameter is a number or a schedule. ``param_groups`` contains the current value for each group.
"""

import matplotlib.pyplot as plt
import torch

from wsam import GSAM, WSAM
from wsam._utils.plot_style import COLORS, MUTED_COLOR, RC_PARAMS, set_title
from wsam.schedule import InverseSqrt, Warmup

plt.rcParams.update(RC_PARAMS)
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


figure, (upper, lower) = plt.subplots(2, 1, figsize=(5.8, 5.4), layout="constrained")
warmed_up = values(lambda base: WSAM(base, gamma=Warmup(0.9, steps=40)), "sam_gamma")
upper.plot(warmed_up, color=COLORS["wsam"])
upper.set(xlabel="step", ylabel="γ")
note = {"loc": "left", "fontsize": 10, "color": MUTED_COLOR}
upper.set_title("WSAM, Warmup(0.9, steps=40)", **note)
decreasing = values(lambda base: WSAM(base, rho=InverseSqrt(0.1)), "sam_rho")
lower.plot(decreasing, label="WSAM, InverseSqrt(0.1)", color=COLORS["wsam"])
scaled = values(lambda base: GSAM(base, rho=0.1, rho_min=0.02), "sam_rho")
lower.plot(scaled, label="GSAM, rho_min=0.02", color=COLORS["gsam"])
lower.set(xlabel="step", ylabel="ρ", ylim=(0, 0.12))
lower.set_title("over SGD with a cosine schedule of the learning rate", **note)
set_title(figure, "A warm-up raises γ; ρ falls with the steps\nor with the learning rate")
lower.legend()
plt.show()
