"""
How flat is the minimum?
========================

A small network is trained with SGD and with WSAM on digits, with 40% of the training labels redrawn at
random. The figure shows the loss along a random direction through the weights of each; the program also
prints the largest eigenvalue of the Hessian. There is one run of each method, and the learning rate of
SGD is not tuned.

Which minimum is flatter depends on how flatness is measured: :doc:`/demo` and :doc:`/paper` have
measurements in which the weights of SGD are the flatter ones.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import wsam
from wsam._utils.plot_style import COLORS, MUTED_COLOR, RC_PARAMS, set_title
from wsam.curvature import hessian, landscape, random_direction, top_eigenvalues

plt.rcParams.update(RC_PARAMS)
torch.manual_seed(0)
pixels, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
order = torch.randperm(len(digits))
x, y = pixels[order].float() / 16, digits[order]
x_test, y_test, x, y = x[1200:], y[1200:], x[:1200], y[:1200]
redrawn = torch.rand(1200) < 0.4
y[redrawn] = torch.randint(0, 10, (int(redrawn.sum()),))


def train(wrap, epochs):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model.append(nn.Linear(64, 10))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    train_step = wsam.train_step(optimizer, lambda x, y: cross_entropy(model(x), y))
    for _ in range(epochs):
        for batch in torch.randperm(1200).split(100):
            train_step(x[batch], y[batch])
    return model.eval()


# %%
# SGD trains for twice as many epochs, since a step of WSAM computes two gradients.

models = {
    "SGD": train(lambda base: base, epochs=60),
    "WSAM": train(lambda base: wsam.WSAM(base, rho=0.3, gamma=0.9), epochs=30),
}
for name, model in models.items():
    error = 100 * (model(x_test).argmax(1) != y_test).float().mean()
    top = top_eigenvalues(hessian(model, cross_entropy, [(x, y)]), 1).values[0]
    print(f"{name}: test error {error:.1f}%, largest eigenvalue {top:.1f}")

# %%
# The direction is scaled to the norms of the model's filters, so that the two lines are comparable.

steps = [i / 20 for i in range(-20, 21)]
figure, axes = plt.subplots(figsize=(5.8, 4), layout="constrained")
for name, model in models.items():
    direction = random_direction(model, seed=0)
    found = landscape(model, cross_entropy, [(x, y)], [direction], [steps])
    axes.plot(steps, found.losses, label=name, color=COLORS[name.lower()])
axes.set(xlabel="distance along a random direction", ylabel="training loss")
set_title(figure, "Along a random direction, the loss rises\nless around the weights of WSAM")
note = "digits with 40% noisy labels, one run of each method"
axes.set_title(note, loc="left", fontsize=10, color=MUTED_COLOR)
axes.legend()
plt.show()
