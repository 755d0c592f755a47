"""
What gamma does to one update
=============================

Without momentum a step is ``g0 + k (g1 - g0)`` with ``k = gamma/(1 - gamma)``: its tip moves along the
line from g0 through g1 and beyond. The arrows are steps of the optimizer itself.
"""

import matplotlib.pyplot as plt
import torch

from wsam import WSAM

steepness = torch.tensor([1.0, 3.0])


def one_step(gamma: float) -> torch.Tensor:
    w = torch.tensor([1.0, -0.8], requires_grad=True)
    optimizer = WSAM(torch.optim.SGD([w], lr=1.0), rho=0.6, gamma=gamma)

    def closure():
        loss = (steepness * w.square()).sum() / 2
        loss.backward()
        return loss

    before = w.detach().clone()
    optimizer.step(closure)
    return before - w.detach()


# %%
# gamma = 0 is the base optimizer, 1/2 is SAM. Above 1/2 the step leans further towards the steep
# direction than SAM's.

names = {0.0: "0: SGD", 0.3: "0.3", 0.5: "0.5: SAM", 0.6: "0.6", 0.7: "0.7"}
figure, panel = plt.subplots(figsize=(6, 4.5))
for gamma, name in names.items():
    x, y = one_step(gamma).tolist()
    panel.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "->", "color": "tab:blue"})
    panel.text(x + 0.02, y, f"γ = {name}", va="center")
panel.set(xlim=(0, 2.4), ylim=(-7.5, 0), xlabel="first weight", ylabel="second weight, steeper")
panel.set_title("One update by gamma")
plt.show()
