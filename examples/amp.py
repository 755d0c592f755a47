"""Mixed precision: bfloat16 in a closure, or float16 with a GradScaler in a loop by hand.

    python examples/amp.py [bf16|fp16]

The weights stay in float32; only the forward pass is cast. Runs on a GPU if there is one.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from wsam import WSAM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def main(precision: str = "bf16", steps: int = 200) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(DEVICE)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = WSAM(base, rho=0.05, gamma=0.8, model=model)
    scaler = torch.amp.GradScaler(DEVICE)

    for step in range(steps):
        x = torch.randn(128, 20, device=DEVICE)
        y = (x[:, 0] * x[:, 1] > 0).long()

        def forward(x=x, y=y):
            with torch.autocast(DEVICE, TYPES[precision]):
                return cross_entropy(model(x), y)

        def closure(forward=forward):
            loss = forward()
            loss.backward()
            return loss

        if precision == "bf16":
            loss = optimizer.step(closure)
        else:
            optimizer.begin()
            loss = forward()
            scaler.scale(loss).backward()
            optimizer.ascend(grad_scale=scaler.get_scale())  # to w + d
            scaler.scale(forward()).backward()
            scaler.unscale_(optimizer)
            optimizer.descend()  # back to w, bit for bit
            scaler.step(optimizer)  # skips the step if either pass overflowed
            scaler.update()
        if step % 50 == 49:
            print(f"{precision} step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
