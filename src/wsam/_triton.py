"""The kernels of `wsam.kernels` in Triton; importing this needs Triton.

A table holds the addresses of n tensors of the first list, then of the second, and so on.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _part(where, offset, sizes, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    index = tl.load(where + program)
    start = tl.multiple_of(tl.load(offset + program), BLOCK)
    at = start + tl.arange(0, BLOCK)
    return index, at, at < tl.load(sizes + index)


@triton.jit
def _list(table, row, index, n):
    address = tl.load(table + row * n + index)
    return tl.multiple_of(address, 16).to(tl.pointer_type(tl.float32))


@triton.jit
def save_and_add(table, where, offset, sizes, scale, n, BLOCK: tl.constexpr):
    """`saved = w; w += scale * direction`; lists: w, direction, saved."""
    index, at, inside = _part(where, offset, sizes, BLOCK)
    weights = _list(table, 0, index, n)
    w = tl.load(weights + at, mask=inside)
    d = tl.load(_list(table, 1, index, n) + at, mask=inside)
    tl.store(_list(table, 2, index, n) + at, w, mask=inside)
    tl.store(weights + at, w + tl.load(scale) * d, mask=inside)


@triton.jit
def _mix(table, index, n, at, inside, scalars, KEPT: tl.constexpr):
    """Return what is fed and what is beside, of g1 (list 2) and, where it was kept, g0 (list 3)."""
    g1 = tl.load(_list(table, 2, index, n) + at, mask=inside)
    if KEPT:
        g0 = tl.load(_list(table, 3, index, n) + at, mask=inside)
        change = g1 - g0
        fed = tl.load(scalars) * g0 + tl.load(scalars + 1) * change
        beside = tl.load(scalars + 2) * g0 + tl.load(scalars + 3) * change
    else:
        fed = g1
        beside = 0.0 * g1
    return fed, beside


@triton.jit
def finish_sgd(
    table,
    where,
    offset,
    sizes,
    scalars,
    n,
    KEPT: tl.constexpr,
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    DAMPENING: tl.constexpr,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The end of a step over SGD; lists: saved w, w, g1, g0, momentum."""
    index, at, inside = _part(where, offset, sizes, BLOCK)
    w = tl.load(_list(table, 0, index, n) + at, mask=inside)
    fed, beside = _mix(table, index, n, at, inside, scalars, KEPT)
    if DECAY != 0.0:
        fed += DECAY * w
    if MOMENTUM != 0.0:
        history = _list(table, 4, index, n) + at
        m = MOMENTUM * tl.load(history, mask=inside) + (1.0 - DAMPENING) * fed
        tl.store(history, m, mask=inside)
        fed = fed + MOMENTUM * m if NESTEROV else m
    lr = tl.load(scalars + 4)
    new = w - lr * fed
    if KEPT:
        new -= lr * beside
    tl.store(_list(table, 1, index, n) + at, new, mask=inside)


@triton.jit
def finish_adam(
    table,
    where,
    offset,
    sizes,
    scalars,
    n,
    KEPT: tl.constexpr,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPSILON: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The end of a step over Adam or AdamW; lists: saved w, w, g1, g0, mean, mean square, count."""
    index, at, inside = _part(where, offset, sizes, BLOCK)
    w = tl.load(_list(table, 0, index, n) + at, mask=inside)
    fed, beside = _mix(table, index, n, at, inside, scalars, KEPT)
    lr = tl.load(scalars + 4)
    if DECAY != 0.0:
        if DECOUPLED:
            w *= 1.0 - lr * DECAY
        else:
            fed += DECAY * w
    means, squares = _list(table, 4, index, n) + at, _list(table, 5, index, n) + at
    m = tl.load(means, mask=inside)
    m += (1.0 - BETA1) * (fed - m)
    v = BETA2 * tl.load(squares, mask=inside) + (1.0 - BETA2) * fed * fed
    tl.store(means, m, mask=inside)
    tl.store(squares, v, mask=inside)
    count = tl.load(_list(table, 6, index, n))
    first = 1.0 - tl.exp(count * tl.log(tl.full((), BETA1, tl.float32)))
    second = 1.0 - tl.exp(count * tl.log(tl.full((), BETA2, tl.float32)))
    new = w - lr / first * m / (tl.sqrt(v) / tl.sqrt(second) + EPSILON)
    if KEPT:
        new -= lr * beside
    tl.store(_list(table, 1, index, n) + at, new, mask=inside)
