"""
A sharp and a flat minimum
==========================

The paper's two-dimensional example: the lower minimum is the sharper one. All runs start at the same
point. At gamma = 0.95 only the coupled form of WSAM reaches the flat minimum.
"""

import matplotlib.pyplot as plt
import torch

from wsam.toy import loss, places, trace

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
points = torch.stack([mu, sigma], dim=-1).double().reshape(-1, 2)
height = torch.stack([loss(point) for point in points]).reshape(mu.shape)

figure, axes = plt.subplots(figsize=(7, 4.5))
axes.contourf(mu, sigma, height, levels=30, cmap="Greys_r")
for name, run in runs.items():
    path = torch.as_tensor(run.points)
    axes.plot(path[:, 0], path[:, 1], label=name, linewidth=1.4)
for place in places():
    axes.plot(*place.point, "k*")
    axes.annotate(f" {place.name}", place.point)
axes.set(xlabel="μ", ylabel="σ", title="Trajectories on the toy loss")
axes.legend()
plt.show()
