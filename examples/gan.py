"""Train a GAN whose generator and discriminator are both sharpness-aware.

    python examples/gan.py

The data are points near a circle of radius 2.
"""

import torch
from torch import nn
from torch.nn.functional import normalize, softplus

import wsam

generator = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
discriminator = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def sam(trained: nn.Module) -> wsam.SAM:
    base = torch.optim.Adam(trained.parameters(), lr=2e-3, betas=(0.5, 0.99))
    # Each loss runs both models, so both have running statistics to protect.
    return wsam.SAM(base, rho=0.02, model=nn.ModuleList([generator, discriminator]))


def discriminator_loss(real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    fake = generator(noise).detach()
    return softplus(-discriminator(real)).mean() + softplus(discriminator(fake)).mean()


def generator_loss(noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    fake = generator(noise)
    return softplus(-discriminator(fake)).mean(), fake


def main(steps: int = 400) -> None:
    train_discriminator = wsam.train_step(sam(discriminator), discriminator_loss)
    train_generator = wsam.train_step(sam(generator), generator_loss)
    for step in range(steps):
        real = 2 * normalize(torch.randn(128, 2)) + 0.1 * torch.randn(128, 2)
        train_discriminator(real, torch.randn(128, 4))
        loss, fake = train_generator(torch.randn(128, 4))
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss:.3f}, mean radius {fake.norm(dim=1).mean():.2f}")


if __name__ == "__main__":
    main()
