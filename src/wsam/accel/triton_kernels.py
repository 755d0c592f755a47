"""The fused kernels, in Triton. Importing this module needs Triton.

A table holds the addresses of the n tensors of a first list, then of a second list, and so on.
`numbers` is a group's row in double precision, see `base_optimizers.numbers_of`. Only what selects a
branch is a compile-time constant; values that change from step to step are read on the device.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from wsam.accel import base_optimizers

HAS_G0 = tl.constexpr(base_optimizers.HAS_G0)
DECAY = tl.constexpr(base_optimizers.DECAY)
MOMENTUM = tl.constexpr(base_optimizers.MOMENTUM)
NESTEROV = tl.constexpr(base_optimizers.NESTEROV)
ADAM = tl.constexpr(base_optimizers.ADAM)
DECOUPLED_DECAY = tl.constexpr(base_optimizers.DECOUPLED_DECAY)
PRECONDITION = tl.constexpr(base_optimizers.PRECONDITION)
KEEP = tl.constexpr(base_optimizers.KEEP)
REUSE = tl.constexpr(base_optimizers.REUSE)


@triton.jit
def _tile(where, offset, sizes, BLOCK: tl.constexpr):
    """Return the tensor that this program processes, the offset in it, and its size."""
    program = tl.program_id(0)
    index = tl.load(where + program)
    return index, tl.multiple_of(tl.load(offset + program), BLOCK), tl.load(sizes + index)


@triton.jit
def _inside(at, size, FULL: tl.constexpr):
    """Return the mask of a tile. A full tile has a constant mask, so that accesses are vectorized."""
    if FULL:
        return tl.full(at.shape, 1, tl.int1)
    return at < size


@triton.jit
def _list(table, row, index, n):
    address = tl.load(table + row * n + index)
    return tl.multiple_of(tl.multiple_of(address, 16).to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def _read(table, row, index, n, at, inside):
    return tl.load(_list(table, row, index, n) + at, mask=inside, other=0.0)


@triton.jit
def _write(table, row, index, n, at, inside, values):
    tl.store(_list(table, row, index, n) + at, values, mask=inside)


@triton.jit
def _number(numbers, column):
    return tl.load(numbers + column).to(tl.float32)


@triton.jit
def _times(weight, x):
    """Return `weight * x`; nothing where the weight is zero, for 0 * inf would be NaN."""
    return tl.where(weight == 0.0, 0.0, weight * x)


@triton.jit(do_not_specialize=["first", "n"])
def squares(table, where, offset, sizes, partial, first, n, BLOCK: tl.constexpr):
    """The sum of squares of each tile of the direction; lists as of `save_and_add`.

    They go into `partial`, from `first` on.
    """
    index, start, size = _tile(where, offset, sizes, BLOCK)
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        z = _read(table, 1, index, n, at, _inside(at, size, True))
        tl.store(partial + first + tl.program_id(0), tl.sum(z * z))
    else:
        z = _read(table, 1, index, n, at, _inside(at, size, False))
        tl.store(partial + first + tl.program_id(0), tl.sum(z * z))


@triton.jit
def _products(table, index, n, at, inside, partial, place, count):
    g1 = _read(table, 0, index, n, at, inside)
    g0 = _read(table, 1, index, n, at, inside)
    change = g1 - g0
    tl.store(partial + place, tl.sum(g0 * g0).to(tl.float64))
    tl.store(partial + count + place, tl.sum(g1 * g1).to(tl.float64))
    tl.store(partial + 2 * count + place, tl.sum(change * change).to(tl.float64))


@triton.jit(do_not_specialize=["first", "count", "n"])
def products(table, where, offset, sizes, partial, first, count, n, BLOCK: tl.constexpr):
    """The sums of squares of g0, g1 and g1 - g0 of each tile; lists: g1, g0.

    They go into three rows of `partial`, each `count` long, from `first` on.
    """
    index, start, size = _tile(where, offset, sizes, BLOCK)
    at = start + tl.arange(0, BLOCK)
    place = first + tl.program_id(0)
    if start + BLOCK <= size:
        _products(table, index, n, at, _inside(at, size, True), partial, place, count)
    else:
        _products(table, index, n, at, _inside(at, size, False), partial, place, count)


@triton.jit(do_not_specialize=["count", "groups"])
def scales(
    partial,
    count,
    numbers,
    result,
    groups,
    EPSILON: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`radius / (norm + eps)` of each group, from the sums of all tiles. One program."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partial + at, mask=at < count, other=0.0)
    norm = tl.sqrt(tl.sum(total))
    group = tl.arange(0, GROUPS)
    radius = tl.load(numbers + group * COLUMNS, mask=group < groups, other=0.0).to(tl.float32)
    # norm - norm is NaN for an infinite norm, which would otherwise make d zero and hide the overflow.
    scale = radius / (norm + EPSILON) + (norm - norm)
    tl.store(result + STRIDE * group, scale, mask=group < groups)


@triton.jit
def _save_and_add(table, index, n, at, inside, scale):
    w = _read(table, 0, index, n, at, inside)
    d = _read(table, 1, index, n, at, inside)
    _write(table, 2, index, n, at, inside, w)
    _write(table, 0, index, n, at, inside, w + tl.load(scale) * d)


@triton.jit(do_not_specialize=["n"])
def save_and_add(table, where, offset, sizes, scale, n, BLOCK: tl.constexpr):
    """`saved = w; w += scale * direction`; lists: w, direction, saved."""
    index, start, size = _tile(where, offset, sizes, BLOCK)
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        _save_and_add(table, index, n, at, _inside(at, size, True), scale)
    else:
        _save_and_add(table, index, n, at, _inside(at, size, False), scale)


@triton.jit
def _mix(table, index, n, at, inside, numbers, BRANCHES: tl.constexpr):
    """Return base_grad and decoupled, from g1 (list 2) and, where the rule keeps it, g0 (list 3).

    With REUSE, list 2 is g0 and list 3 the kept vector. With KEEP, g1 - g0 is written to the last list.
    """
    g1 = _read(table, 2, index, n, at, inside)
    if HAS_G0 & BRANCHES:
        if REUSE & BRANCHES:
            g0 = g1
            change = _read(table, 3, index, n, at, inside)
        else:
            g0 = _read(table, 3, index, n, at, inside)
            change = g1 - g0
        if KEEP & BRANCHES:
            last = 7 if ADAM & BRANCHES else (5 if MOMENTUM & BRANCHES else 4)
            _write(table, last, index, n, at, inside, change)
        grad = _times(_number(numbers, 1), g0) + _times(_number(numbers, 2), change)
        decoupled = _times(_number(numbers, 3), g0) + _times(_number(numbers, 4), change)
    else:
        grad = g1
        decoupled = 0.0 * g1
    return grad, decoupled


@triton.jit
def _sgd(table, index, n, at, inside, w, grad, numbers, BRANCHES: tl.constexpr):
    """Return the result of SGD's step; its momentum is list 4."""
    if DECAY & BRANCHES:
        grad += _number(numbers, 6) * w
    if MOMENTUM & BRANCHES:
        momentum = _number(numbers, 7)
        take = (1.0 - tl.load(numbers + 8)).to(tl.float32)
        m = momentum * _read(table, 4, index, n, at, inside) + take * grad
        _write(table, 4, index, n, at, inside, m)
        grad = grad + momentum * m if NESTEROV & BRANCHES else m
    return w - _number(numbers, 5) * grad


@triton.jit
def _adam(table, index, n, at, inside, w, grad, decoupled, numbers, BRANCHES: tl.constexpr):
    """Return the result of Adam(W)'s step; mean, mean square and step count are lists 4, 5 and 6.

    The count is that of the steps before this one. Powers of the betas need double precision. With
    PRECONDITION, the mean square includes that of the decoupled term, which is divided, too.
    """
    lr = _number(numbers, 5)
    if DECAY & BRANCHES:
        if DECOUPLED_DECAY & BRANCHES:
            w *= (1.0 - tl.load(numbers + 5) * tl.load(numbers + 6)).to(tl.float32)
        else:
            grad += _number(numbers, 6) * w
    take = (1.0 - tl.load(numbers + 7)).to(tl.float32)
    m = _read(table, 4, index, n, at, inside)
    m += take * (grad - m)
    take = (1.0 - tl.load(numbers + 8)).to(tl.float32)
    square = grad * grad
    if PRECONDITION & BRANCHES:
        square += decoupled * decoupled
    v = _number(numbers, 8) * _read(table, 5, index, n, at, inside) + take * square
    _write(table, 4, index, n, at, inside, m)
    _write(table, 5, index, n, at, inside, v)
    count = tl.load(_list(table, 6, index, n)).to(tl.float64) + 1.0
    first = (1.0 - tl.exp(count * tl.load(numbers + 10))).to(tl.float32)
    second = (1.0 - tl.exp(count * tl.load(numbers + 11))).to(tl.float32)
    update = lr / first * m
    if PRECONDITION & BRANCHES:
        update += lr * decoupled
    return w - update / (tl.sqrt(v) / tl.sqrt(second) + _number(numbers, 9))


@triton.jit
def _base(table, index, n, at, inside, w, grad, decoupled, numbers, BRANCHES: tl.constexpr):
    """Return the result of the base's step, with the decoupled term if that is preconditioned."""
    if ADAM & BRANCHES:
        new = _adam(table, index, n, at, inside, w, grad, decoupled, numbers, BRANCHES)
    else:
        new = _sgd(table, index, n, at, inside, w, grad, numbers, BRANCHES)
    return new


@triton.jit
def _finish(table, index, n, at, inside, numbers, BRANCHES: tl.constexpr):
    w = _read(table, 0, index, n, at, inside)
    grad, decoupled = _mix(table, index, n, at, inside, numbers, BRANCHES)
    new = _base(table, index, n, at, inside, w, grad, decoupled, numbers, BRANCHES)
    if ((HAS_G0 | PRECONDITION) & BRANCHES) == HAS_G0:
        new -= _number(numbers, 5) * decoupled
    _write(table, 1, index, n, at, inside, new)


@triton.jit(do_not_specialize=["n"])
def finish(table, where, offset, sizes, numbers, n, BRANCHES: tl.constexpr, BLOCK: tl.constexpr):
    """The end of a step; lists: saved w, w, g1, g0, the base's, and with KEEP the kept vector.

    With REUSE the first four are w, w, g0 and the kept vector.
    """
    index, start, size = _tile(where, offset, sizes, BLOCK)
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        _finish(table, index, n, at, _inside(at, size, True), numbers, BRANCHES)
    else:
        _finish(table, index, n, at, _inside(at, size, False), numbers, BRANCHES)


@triton.jit
def _begin_lean(table, index, n, at, inside, numbers, scale, BRANCHES: tl.constexpr):
    w = _read(table, 0, index, n, at, inside)
    g0 = _read(table, 1, index, n, at, inside)
    direction = _read(table, 2, index, n, at, inside)
    grad = _times(_number(numbers, 1), g0)
    new = _base(table, index, n, at, inside, w, grad, 0.0, numbers, BRANCHES)
    weight = _number(numbers, 3) - _number(numbers, 4)
    new -= _number(numbers, 5) * _times(weight, g0)
    _write(table, 3, index, n, at, inside, new)
    _write(table, 0, index, n, at, inside, w + tl.load(scale) * direction)


@triton.jit(do_not_specialize=["n"])
def begin_lean(
    table, where, offset, sizes, numbers, scale, n, BRANCHES: tl.constexpr, BLOCK: tl.constexpr
):
    """The base's step and w + d; lists: w, g0, direction, result without g1, and the base's."""
    index, start, size = _tile(where, offset, sizes, BLOCK)
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        _begin_lean(table, index, n, at, _inside(at, size, True), numbers, scale, BRANCHES)
    else:
        _begin_lean(table, index, n, at, _inside(at, size, False), numbers, scale, BRANCHES)


@triton.jit
def _end_lean(table, index, n, at, inside, numbers):
    partial = _read(table, 0, index, n, at, inside)
    g1 = _read(table, 2, index, n, at, inside)
    new = partial - _number(numbers, 5) * _times(_number(numbers, 4), g1)
    _write(table, 1, index, n, at, inside, new)


@triton.jit(do_not_specialize=["n"])
def end_lean(table, where, offset, sizes, numbers, n, BLOCK: tl.constexpr):
    """The end of a lean step; lists: result without g1, w, g1."""
    index, start, size = _tile(where, offset, sizes, BLOCK)
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        _end_lean(table, index, n, at, _inside(at, size, True), numbers)
    else:
        _end_lean(table, index, n, at, _inside(at, size, False), numbers)
