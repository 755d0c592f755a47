"""Which lists of tensors a kernel may walk side by side."""

import torch

from wsam import block


def test_what_is_dense() -> None:
    assert block.is_dense(torch.zeros(2, 3))
    assert block.is_dense(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert not block.is_dense(torch.zeros(4, 6)[:, :3])


def test_which_lists_a_kernel_may_walk() -> None:
    one, other = [torch.zeros(2, 3)], [torch.ones(2, 3)]
    assert block.can_fuse(one, other)
    assert not block.can_fuse(one, [torch.ones(3, 2).t()])
    assert not block.can_fuse([torch.zeros(2, 3).double()], [torch.ones(2, 3).double()])
    assert not block.can_fuse([torch.zeros(4, 6)[:, :3]], [torch.zeros(4, 6)[:, :3]])
