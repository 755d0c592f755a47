"""The kernels of `wsam.kernels` in Triton; importing this needs Triton.

A table holds the addresses of n tensors of the first list, then of the second, and so on. `numbers`
are a group's, in double precision: see `wsam.bases.numbers_of`. What decides between branches is a
constant of a kernel; what may change from step to step is not, or each step would be compiled. Nor is
anything made of the values of counts, so that a kernel that was made once serves them all.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from wsam import bases

KEPT = tl.constexpr(bases.KEPT)
DECAY = tl.constexpr(bases.DECAY)
MOMENTUM = tl.constexpr(bases.MOMENTUM)
NESTEROV = tl.constexpr(bases.NESTEROV)
ADAM = tl.constexpr(bases.ADAM)
DECOUPLED = tl.constexpr(bases.DECOUPLED)


@triton.jit
def _tile(where, offset, sizes, BLOCK: tl.constexpr):
    """Return which tensor this program works on, from where, and how large that tensor is."""
    program = tl.program_id(0)
    index = tl.load(where + program)
    return index, tl.multiple_of(tl.load(offset + program), BLOCK), tl.load(sizes + index)


@triton.jit
def _inside(at, size, FULL: tl.constexpr):
    """Return the mask of a tile; one that is known to be full is read and written by wide words."""
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
    ROOM: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`radius / (norm + eps)` of each group, from the sums of all tiles; one program.

    A group's result is followed by a mark, zero until a kernel has gone on with it.
    """
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partial + at, mask=at < count, other=0.0)
    norm = tl.sqrt(tl.sum(total))
    group = tl.arange(0, GROUPS)
    radius = tl.load(numbers + group * COLUMNS, mask=group < groups, other=0.0).to(tl.float32)
    # norm - norm is NaN for an infinite norm, which would else make d zero and hide the overflow.
    scale = radius / (norm + EPSILON) + (norm - norm)
    tl.store(result + ROOM * group, scale, mask=group < groups)
    tl.store(result + ROOM * group + 1, tl.zeros_like(scale), mask=group < groups)


@triton.jit
def _mark(scale):
    """Say that the kernel that goes on with the scale has been launched."""
    if tl.program_id(0) == 0:
        tl.store(scale + 1, 1.0)


@triton.jit
def _save_and_add(table, index, n, at, inside, scale):
    w = _read(table, 0, index, n, at, inside)
    d = _read(table, 1, index, n, at, inside)
    _write(table, 2, index, n, at, inside, w)
    _write(table, 0, index, n, at, inside, w + tl.load(scale) * d)


@triton.jit(do_not_specialize=["n"])
def save_and_add(table, where, offset, sizes, scale, n, BLOCK: tl.constexpr):
    """`saved = w; w += scale * direction`; lists: w, direction, saved."""
    _mark(scale)
    index, start, size = _tile(where, offset, sizes, BLOCK)
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        _save_and_add(table, index, n, at, _inside(at, size, True), scale)
    else:
        _save_and_add(table, index, n, at, _inside(at, size, False), scale)


@triton.jit
def _mix(table, index, n, at, inside, numbers, BRANCHES: tl.constexpr):
    """Return what is fed and what is beside, of g1 (list 2) and, where it was kept, g0 (list 3)."""
    g1 = _read(table, 2, index, n, at, inside)
    if KEPT & BRANCHES:
        g0 = _read(table, 3, index, n, at, inside)
        change = g1 - g0
        fed = _times(_number(numbers, 1), g0) + _times(_number(numbers, 2), change)
        beside = _times(_number(numbers, 3), g0) + _times(_number(numbers, 4), change)
    else:
        fed = g1
        beside = 0.0 * g1
    return fed, beside


@triton.jit
def _sgd(table, index, n, at, inside, w, fed, numbers, BRANCHES: tl.constexpr):
    """Return what SGD makes of w; its momentum is list 4."""
    if DECAY & BRANCHES:
        fed += _number(numbers, 6) * w
    if MOMENTUM & BRANCHES:
        keep = _number(numbers, 7)
        take = (1.0 - tl.load(numbers + 8)).to(tl.float32)
        m = keep * _read(table, 4, index, n, at, inside) + take * fed
        _write(table, 4, index, n, at, inside, m)
        fed = fed + keep * m if NESTEROV & BRANCHES else m
    return w - _number(numbers, 5) * fed


@triton.jit
def _adam(table, index, n, at, inside, w, fed, numbers, BRANCHES: tl.constexpr):
    """Return what Adam(W) makes of w; its mean, mean square and count are lists 4, 5 and 6.

    The count is that of the steps before this one. Its powers lose their digits in single precision.
    """
    lr = _number(numbers, 5)
    if DECAY & BRANCHES:
        if DECOUPLED & BRANCHES:
            w *= (1.0 - tl.load(numbers + 5) * tl.load(numbers + 6)).to(tl.float32)
        else:
            fed += _number(numbers, 6) * w
    take = (1.0 - tl.load(numbers + 7)).to(tl.float32)
    m = _read(table, 4, index, n, at, inside)
    m += take * (fed - m)
    take = (1.0 - tl.load(numbers + 8)).to(tl.float32)
    v = _number(numbers, 8) * _read(table, 5, index, n, at, inside) + take * fed * fed
    _write(table, 4, index, n, at, inside, m)
    _write(table, 5, index, n, at, inside, v)
    count = tl.load(_list(table, 6, index, n)).to(tl.float64) + 1.0
    first = (1.0 - tl.exp(count * tl.load(numbers + 10))).to(tl.float32)
    second = (1.0 - tl.exp(count * tl.load(numbers + 11))).to(tl.float32)
    return w - lr / first * m / (tl.sqrt(v) / tl.sqrt(second) + _number(numbers, 9))


@triton.jit
def _base(table, index, n, at, inside, w, fed, numbers, BRANCHES: tl.constexpr):
    """Return what the base makes of w."""
    if ADAM & BRANCHES:
        new = _adam(table, index, n, at, inside, w, fed, numbers, BRANCHES)
    else:
        new = _sgd(table, index, n, at, inside, w, fed, numbers, BRANCHES)
    return new


@triton.jit
def _finish(table, index, n, at, inside, numbers, BRANCHES: tl.constexpr):
    w = _read(table, 0, index, n, at, inside)
    fed, beside = _mix(table, index, n, at, inside, numbers, BRANCHES)
    new = _base(table, index, n, at, inside, w, fed, numbers, BRANCHES)
    if KEPT & BRANCHES:
        new -= _number(numbers, 5) * beside
    _write(table, 1, index, n, at, inside, new)


@triton.jit(do_not_specialize=["n"])
def finish(table, where, offset, sizes, numbers, n, BRANCHES: tl.constexpr, BLOCK: tl.constexpr):
    """The end of a step; lists: saved w, w, g1, g0, and the base's."""
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
    fed = _times(_number(numbers, 1), g0)
    new = _base(table, index, n, at, inside, w, fed, numbers, BRANCHES)
    weight = _number(numbers, 3) - _number(numbers, 4)
    new -= _number(numbers, 5) * _times(weight, g0)
    _write(table, 3, index, n, at, inside, new)
    _write(table, 0, index, n, at, inside, w + tl.load(scale) * direction)


@triton.jit(do_not_specialize=["n"])
def begin_lean(
    table, where, offset, sizes, numbers, scale, n, BRANCHES: tl.constexpr, BLOCK: tl.constexpr
):
    """The base's step and the way to w + d; lists: w, g0, direction, result less g1, and the base's."""
    _mark(scale)
    index, start, size = _tile(where, offset, sizes, BLOCK)
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        _begin_lean(table, index, n, at, _inside(at, size, True), numbers, scale, BRANCHES)
    else:
        _begin_lean(table, index, n, at, _inside(at, size, False), numbers, scale, BRANCHES)


@triton.jit
def _end_lean(table, index, n, at, inside, numbers):
    kept = _read(table, 0, index, n, at, inside)
    g1 = _read(table, 2, index, n, at, inside)
    new = kept - _number(numbers, 5) * _times(_number(numbers, 4), g1)
    _write(table, 1, index, n, at, inside, new)


@triton.jit(do_not_specialize=["n"])
def end_lean(table, where, offset, sizes, numbers, n, BLOCK: tl.constexpr):
    """The end of a lean step; lists: result less g1, w, g1."""
    index, start, size = _tile(where, offset, sizes, BLOCK)
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= size:
        _end_lean(table, index, n, at, _inside(at, size, True), numbers)
    else:
        _end_lean(table, index, n, at, _inside(at, size, False), numbers)
