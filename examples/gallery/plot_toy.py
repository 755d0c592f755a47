"""
A sharp and a flat minimum
==========================

The paper's two-dimensional example: the lower minimum is the sharper one. All runs start at the same
point. At gamma = 0.95 only the coupled form of WSAM reaches the flat minimum.
"""

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap

from wsam._utils.plot_style import COLORS, MUTED_COLOR, RC_PARAMS, set_title
from wsam.toy import loss, places, trace
from wsam.toy.plot_trajectories import LOSS_COLORS

plt.rcParams.update(RC_PARAMS)
runs = {
    "SAM": trace(rule="sam"),
    "WSAM, γ = 0.95": trace(rule="wsam", gamma=0.95),
    "Coupled-WSAM, γ = 0.95": trace(rule="coupled_wsam", gamma=0.95),
}
for name, run in runs.items():
    print(f"{name}: {run.minimum} minimum, loss {run.loss:.4f}")

# %%
# The trajectories on a map of the loss.

mu, sigma = torch.meshgrid(torch.linspace(-25, 35, 60), torch.linspace(2, 45, 45), indexing="xy")
height = loss(torch.stack([mu, sigma], dim=-1).double())

figure, axes = plt.subplots(figsize=(5.8, 4.5), layout="constrained")
levels = [0.26 + 0.02 * i for i in range(20)]
cmap = LinearSegmentedColormap.from_list("loss", LOSS_COLORS)
axes.contourf(mu, sigma, height, levels=levels, cmap=cmap, extend="max")
for name, run in runs.items():
    path = torch.as_tensor(run.points)
    axes.plot(path[:, 0], path[:, 1], label=name, linewidth=2, color=COLORS[run.setting.rule])
for place in places():
    axes.plot(*place.point, "k*")
    axes.annotate(place.name, place.point, (0, 7), textcoords="offset points", ha="center")
axes.set(xlabel="μ", ylabel="σ")
set_title(figure, "At γ = 0.95 only Coupled-WSAM reaches the flat minimum")
note = "contours of the loss, one run each (there is no randomness)"
axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
axes.legend(loc="upper left")
plt.show()
