"""Program of test_accelerate: train in two processes, check that replicas agree, save the weights."""

import ddp_pair
import torch
from accelerate_helpers import Run
from framework_helpers import net, wsam_over_sgd


def work(rank: int, folder: str) -> None:
    run = Run(
        lambda params: wsam_over_sgd(params, max_norm=0.3),
        accumulate=2,
        size=2,
        model=net(torch.float64),
    )
    run.scheduler.step = lambda: None  # it would step once for each process
    run.epochs()
    assert run.accelerator.num_processes == 2
    for p in run.body.parameters():
        both = run.accelerator.gather(p.detach()[None])
        assert torch.equal(both[0], both[1]), "replicas differ"
    if rank == 0:
        torch.save(run.body.state_dict(), f"{folder}/two.pt")


if __name__ == "__main__":
    ddp_pair.start(work)
