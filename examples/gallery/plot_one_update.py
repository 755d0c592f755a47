"""
Effect of gamma on one update
=============================

Without momentum a step is ``g0 + k (g1 - g0)`` with ``k = gamma/(1 - gamma)``: its end point moves
along the line from g0 through g1 and beyond. The arrows are steps of the optimizer.
"""

import matplotlib.pyplot as plt
import torch

from wsam import WSAM
from wsam._utils.plot_style import COLORS, MUTED_COLOR, RC_PARAMS, set_title

plt.rcParams.update(RC_PARAMS)
curvature = torch.tensor([1.0, 3.0])


def one_step(gamma: float) -> torch.Tensor:
    w = torch.tensor([1.0, -0.8], requires_grad=True)
    optimizer = WSAM(torch.optim.SGD([w], lr=1.0), rho=0.6, gamma=gamma)

    def closure():
        loss = (curvature * w.square()).sum() / 2
        loss.backward()
        return loss

    before = w.detach().clone()
    optimizer.step(closure)
    return before - w.detach()


# %%
# gamma = 0 is the base optimizer, 1/2 is SAM. Above 1/2 the step turns further towards the direction of
# large curvature than SAM's.

names = {0.0: "0: SGD", 0.3: "0.3", 0.5: "0.5: SAM", 0.6: "0.6", 0.7: "0.7"}
figure, axes = plt.subplots(figsize=(5.8, 4.5), layout="constrained")
for gamma, name in names.items():
    x, y = one_step(gamma).tolist()
    axes.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "->", "color": COLORS["wsam"]})
    axes.text(x + 0.02, y, f"γ = {name}", va="center")
axes.set(
    xlim=(0, 2.4), ylim=(-7.5, 0), xlabel="first weight", ylabel="second weight (larger curvature)"
)
set_title(figure, "The larger γ, the more a step follows the large curvature")
note = "one step of WSAM on a quadratic, no momentum, ρ = 0.6"
axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
plt.show()
