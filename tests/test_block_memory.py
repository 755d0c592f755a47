"""Copies in one piece of memory: exact, aligned, with the strides of their originals."""

import pytest
import torch

from wsam import block


def many() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5,), (), (3, 7), (2, 3, 4, 5), (0, 3), (64,), (65,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors[3] = tensors[3].to(memory_format=torch.channels_last)
    return tensors


def test_like_keeps_shapes_and_strides_and_parts_do_not_overlap() -> None:
    tensors = many()
    fresh = block.like(tensors)
    for value, (mine, original) in enumerate(zip(fresh, tensors, strict=True)):
        assert mine.shape == original.shape
        assert mine.stride() == original.stride()
        assert mine.storage_offset() % block.ALIGN == 0
        mine.fill_(value)
    for value, mine in enumerate(fresh):
        assert bool((mine == value).all())


@pytest.mark.parametrize("flat", [True, False])
def test_copies_are_exact(flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if flat:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    tensors = many()
    tensors[0][0] = torch.nan
    for mine, original in zip(block.copies(tensors), tensors, strict=True):
        assert mine.data_ptr() != original.data_ptr() or not original.numel()
        torch.testing.assert_close(mine, original, rtol=0, atol=0, equal_nan=True)


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
