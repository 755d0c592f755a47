"""Copies are exact, whatever the values and the order in memory."""

import pytest
import torch

from wsam.block import copies


def check_copies(device: torch.device, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal / 2
    odd = torch.tensor([0.0, -0.0, tiny, -tiny, torch.inf, -torch.inf, 1 / 3], dtype=dtype)
    images = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    tensors = [
        odd.to(device),
        images.to(device, dtype).to(memory_format=torch.channels_last),
        torch.full((), -1 / 3, dtype=dtype, device=device),
        torch.zeros(0, 3, dtype=dtype, device=device),
    ]
    for mine, original in zip(copies(tensors), tensors, strict=True):
        assert mine.stride() == original.stride()
        assert mine.dtype == original.dtype
        assert not mine.numel() or mine.data_ptr() != original.data_ptr()
        assert torch.equal(mine, original)
        assert torch.equal(torch.signbit(mine), torch.signbit(original))


def test_copies_are_exact() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        check_copies(torch.device("cpu"), dtype)
    counts = [torch.tensor(2**40 + 1), torch.tensor([True, False])]
    assert all(map(torch.equal, copies(counts), counts))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_copies_are_exact_on_cuda(dtype: torch.dtype) -> None:
    check_copies(torch.device("cuda"), dtype)
