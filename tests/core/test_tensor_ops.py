"""Operations on lists of tensors: exact copies and memory layout."""

import pytest
import torch

from wsam._core import tensor_ops
from wsam._core.tensor_ops import copies, is_dense

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def check_copies(device: torch.device, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 2
    special = torch.tensor([0.0, -0.0, tiny, -tiny, torch.inf, -torch.inf, 1 / 3], dtype=dtype)
    images = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    tensors = [
        special.to(device),
        images.to(device, dtype).to(memory_format=torch.channels_last),
        torch.full((), -1 / 3, dtype=dtype, device=device),
        torch.zeros(0, 3, dtype=dtype, device=device),
    ]
    for copy, original in zip(copies(tensors), tensors, strict=True):
        assert copy.stride() == original.stride()
        assert copy.dtype == original.dtype
        assert not copy.numel() or copy.data_ptr() != original.data_ptr()
        assert torch.equal(copy, original)
        assert torch.equal(torch.signbit(copy), torch.signbit(original))


def test_copies_are_exact() -> None:
    for dtype in DTYPES:
        check_copies(torch.device("cpu"), dtype)
    counts = [torch.tensor(2**40 + 1), torch.tensor([True, False])]
    assert all(map(torch.equal, copies(counts), counts))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_are_exact_on_cuda(dtype: torch.dtype) -> None:
    check_copies(torch.device("cuda"), dtype)


def test_is_dense() -> None:
    assert is_dense(torch.zeros(2, 3))
    assert is_dense(torch.zeros(2, 3).t())
    assert is_dense(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    assert not is_dense(torch.zeros(4, 6)[:, :3])


def test_lists_that_the_fused_sgd_kernel_can_add() -> None:
    one, other = [torch.zeros(2, 3)], [torch.ones(2, 3)]
    assert tensor_ops._can_use_fused_sgd(one, other)
    assert not tensor_ops._can_use_fused_sgd(one, [torch.ones(3, 2).t()])
    double = [torch.zeros(2, 3).double()]
    assert not tensor_ops._can_use_fused_sgd(double, double)
    sliced = [torch.zeros(4, 6)[:, :3]]
    assert not tensor_ops._can_use_fused_sgd(sliced, sliced)
