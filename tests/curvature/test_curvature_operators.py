"""Curvature operators, compared with dense float64 matrices for several models and losses."""

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from wsam.curvature import Operator, empirical_fisher, gauss_newton, hessian

MODES = ("reverse", "forward", "auto")


class Tied(nn.Module):
    """Tied weights and a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.full((4,), 1.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x) * self.scale))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.3, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.reshape(len(x), 2, -1)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.reshape(len(x), 2, 2))[0][:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))


def cnn() -> nn.Module:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.GELU(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip
    model(torch.randn(16, 4))  # running statistics that are not 0 and 1
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "mlp": (mlp, 4), "cnn": (cnn, 4), "tied": (Tied, 4), "attention": (Attention, 8),
    "lstm": (Recurrent, 4),
}  # fmt: skip


def batches(width: int, sizes: tuple[int, ...] = (6, 3, 4)) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, width).double(), torch.randint(0, 3, (n,))) for n in sizes]


def dense_hessian(model: nn.Module, loss: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
    """Return the dense Hessian of a loss of named weights, by torch.autograd.functional."""
    named = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    sizes = [p.numel() for p in named.values()]

    def flat_loss(flat: Tensor) -> Tensor:
        pieces = zip(named.items(), flat.split(sizes), strict=True)
        return loss({name: piece.view(p.shape) for (name, p), piece in pieces})

    flat = torch.cat([p.reshape(-1) for p in named.values()])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.autograd.functional.hessian(flat_loss, flat)


def jacobian(model: nn.Module, output: Callable[[dict[str, Tensor]], Tensor]) -> Tensor:
    """Return the Jacobian: one row per output, one column per weight."""
    leaves = {
        n: p.detach().requires_grad_() for n, p in model.named_parameters() if p.requires_grad
    }
    rows = output(leaves).reshape(-1)
    return torch.stack([
        torch.cat([g.reshape(-1) for g in torch.autograd.grad(
            row, list(leaves.values()), retain_graph=True, materialize_grads=True)])
        for row in rows
    ])  # fmt: skip


def assert_equals_matrix(found: Operator, expected: Tensor) -> None:
    """Compare products with random vectors and one column."""
    vectors = torch.randn(len(expected), 4, dtype=torch.float64)
    vectors[:, 0] = 0
    vectors[-1, 0] = 1
    torch.testing.assert_close(found @ vectors, expected @ vectors, rtol=0, atol=1e-8)


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    build, width = MODELS[request.param]
    return build().double(), batches(width)


def test_hessian_equals_the_dense_matrix(case):
    model, data = case
    operators = [hessian(model, F.cross_entropy, data, differentiation=mode) for mode in MODES]
    model.eval()
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    expected = dense_hessian(model, lambda w: F.cross_entropy(functional_call(model, w, (x,)), y))
    for H in operators:
        assert H.shape == expected.shape
        assert H.dtype == torch.float64
        assert_equals_matrix(H, expected)


def test_gauss_newton_and_fisher_equal_the_dense_matrices(case):
    model, data = case
    loss = F.cross_entropy
    operators = [gauss_newton(model, loss, data, differentiation=mode) for mode in MODES]
    fishers = [empirical_fisher(model, loss, data, differentiation=mode) for mode in MODES]
    model.eval()
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    J = jacobian(model, lambda w: functional_call(model, w, (x,))).reshape(len(x), 3, -1)
    p = torch.softmax(model(x).detach(), 1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = torch.einsum("nkp,nkl,nlq->pq", J, middle, J) / len(x)
    g = torch.einsum("nk,nkp->np", p - F.one_hot(y, 3), J)
    for G, E in zip(operators, fishers, strict=True):
        assert_equals_matrix(G, expected)
        assert_equals_matrix(E, g.T @ g / len(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("weight_norm", [
    nn.utils.parametrizations.weight_norm,
    pytest.param(nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore::FutureWarning")),
])  # fmt: skip
def test_weight_norm(mode, weight_norm):
    model, data = nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh()).double(), batches(4)
    x, y = (torch.cat(part) for part in zip(*data, strict=True))
    names = [name for name, _ in model.named_parameters()]

    def loss(w):
        bias, g, v = (w[name] for name in names)
        weight = v * g / v.square().sum(1, keepdim=True).sqrt()
        return F.cross_entropy(torch.tanh(F.linear(x, weight, bias)), y)

    H = hessian(model, F.cross_entropy, data, differentiation=mode)
    assert_equals_matrix(H, dense_hessian(model, loss))


class Words(nn.Module):
    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 3, padding_idx=padding)
        nn.init.normal_(self.rows.weight)

    def forward(self, words: Tensor) -> Tensor:
        return torch.tanh(self.rows(words).sum(1))


@pytest.mark.parametrize("mode", MODES)
def test_embeddings(mode):
    model = Words().double()
    words, y = torch.randint(0, 5, (12, 4)), torch.randint(0, 3, (12,))
    H = hessian(model, F.cross_entropy, [(words, y)], differentiation=mode)
    expected = dense_hessian(
        model, lambda w: F.cross_entropy(functional_call(model, w, (words,)), y)
    )
    assert_equals_matrix(H, expected)


@pytest.mark.parametrize("build", [hessian, gauss_newton])
def test_the_row_of_a_padding_index_is_a_constant_in_both_modes(build):
    model = Words(padding=-1).double()
    data = [(torch.randint(0, 5, (12, 4)), torch.randint(0, 3, (12,)))]
    reverse, forward = (
        build(model, F.cross_entropy, data, differentiation=mode).dense()
        for mode in ("reverse", "forward")
    )
    torch.testing.assert_close(forward, reverse)
    assert not forward[12:].any()
    assert not forward[:, 12:].any()
    assert forward[:12, :12].any()


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_train_mode_uses_batch_statistics_and_keeps_the_running_ones(mode):
    model, data = cnn().double(), batches(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    H = hessian(model, F.cross_entropy, data, mode="train", differentiation=mode)
    found = H.dense()
    assert H.info.mode == "train"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.train()
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def loss(w):
        outputs = [functional_call(model, {**buffers, **w}, (x,)) for x, _ in data]
        return F.cross_entropy(torch.cat(outputs), torch.cat([y for _, y in data]))

    torch.testing.assert_close(found, dense_hessian(model, loss), rtol=0, atol=1e-8)
    evaluated = hessian(model, F.cross_entropy, data).dense()
    assert (found - evaluated).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_buffers_that_the_forward_pass_changes_keep_their_values(mode):
    class Counted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counted().double()
    hessian(model, F.cross_entropy, batches(4), mode=mode) @ torch.ones(15)
    assert model.calls == 0


def test_module_modes_are_restored_after_an_error():
    model = cnn().double()
    model.train()
    model[2].eval()
    H = hessian(model, F.cross_entropy, data := batches(4))
    H @ torch.ones(H.shape[0])
    data[1] = (data[1][0], data[1][1] + 100)  # a label out of range
    with pytest.raises(IndexError):
        H @ torch.ones(H.shape[0])
    assert [m.training for m in (model, model[1], model[2], model[6])] == [True, True, False, True]
    assert torch.backends.mha.get_fastpath_enabled()


def test_products_with_vectors_and_matrices():
    model, data = mlp(), [(x.float(), y) for x, y in batches(4)]
    H = hessian(model, F.cross_entropy, data)
    V = torch.randn(H.shape[0], 3)
    product = H @ V
    assert product.dtype == torch.float32
    for column, vector in zip(product.T, V.T, strict=True):
        torch.testing.assert_close(column, H @ vector, rtol=1e-4, atol=1e-6)
    assert H.products == 6
    named = H.split(V[:, 0])
    assert {n: p.shape for n, p in named.items()} == {
        n: p.shape for n, p in model.named_parameters()
    }


def test_float64_of_a_float32_model():
    model, data = cnn(), [(x.float(), y) for x, y in batches(4)]
    H = hessian(model, F.cross_entropy, data, dtype=torch.float64)
    assert (H.dtype, H.info.dtype) == (torch.float64, "float64")
    assert next(model.parameters()).dtype == torch.float32
    doubled = [(x.double(), y) for x, y in data]
    expected = hessian(copy.deepcopy(model).double(), F.cross_entropy, doubled)
    v = torch.randn(H.shape[0], 3).double()
    torch.testing.assert_close(H @ v, expected @ v, rtol=0, atol=1e-12)


def test_dtype_casts_the_loss_frozen_parameters_and_batches():
    model, data = mlp(), [(x.float(), y) for x, y in batches(4)]
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    expected = hessian(copy.deepcopy(model).double(), copy.deepcopy(loss).double(),
                       [(x.double(), y) for x, y in data]).dense()  # fmt: skip
    assert_equals_matrix(hessian(model, loss, data, dtype=torch.float64), expected)
    assert loss.weight.dtype == torch.float32
    assert_equals_matrix(hessian(model.double(), loss, data, dtype=torch.float64), expected)
    model.float()[0].bfloat16().requires_grad_(False)
    assert hessian(model, loss, data, dtype=torch.float32).shape == (18, 18)


def test_info():
    data = batches(4)
    H = hessian(mlp().double(), F.cross_entropy, data, differentiation="forward")
    weights = "<hessian of 43 weights, 13 samples in 3 batches, eval mode, float64 on cpu>"
    assert (repr(H), H.device) == (weights, torch.device("cpu"))
    info = H.info
    assert (info.kind, info.mode, info.samples, info.batches) == ("hessian", "eval", 13, 3)
    assert (info.parameters, info.dtype, info.device) == (43, "float64", "cpu")
    assert (info.tf32, info.differentiation) == (False, "forward")
    assert info.as_dict()["loss"] == pytest.approx(info.loss)


def test_sum_reduction_weight_decay_and_batches_as_mappings():
    model, data = mlp().double(), batches(4)
    expected = hessian(model, F.cross_entropy, data, differentiation="reverse").dense()

    def summed(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum")

    assert_equals_matrix(hessian(model, summed, data, reduction="sum"), expected)

    def decayed(output: Tensor, target: Tensor) -> Tensor:
        penalty = sum((p**2).sum() for p in model.parameters())
        return F.cross_entropy(output, target) + 0.5 * penalty

    for mode in ("reverse", "forward"):
        H = hessian(model, decayed, data, differentiation=mode)
        assert_equals_matrix(H, expected + torch.eye(43).double())

    mappings = [{"input": x, "target": y} for x, y in data]
    loss = lambda out, batch: F.cross_entropy(out, batch["target"])  # noqa: E731
    assert_equals_matrix(hessian(NamedInputs(model), loss, mappings), expected)


@pytest.mark.slow
def test_weighted_samples_in_shuffled_batches():
    model, weights = mlp(), torch.rand(13)  # their sum depends on the order, by rounding
    ((x, y),) = batches(4, (13,))
    data = TensorDataset(x.float(), y, weights)

    def loss(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none") @ weight / weight.sum()

    expected = hessian(model, loss, [data[:]]).dense()
    for seed in range(4):
        order = torch.Generator().manual_seed(seed)
        loader = DataLoader(data, 4, shuffle=True, generator=order)
        H = hessian(model, loss, loader, size=lambda batch: batch[2].sum())
        torch.testing.assert_close(H.dense(), expected, rtol=1e-4, atol=1e-6)


def test_packed_sequences():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(1, 3)

        def forward(self, sequences: Any) -> Tensor:
            return self.rnn(sequences)[1][0]

    model, target = Packed(), torch.tensor([0, 1, 2])
    sequences = [torch.randn(length, 1) for length in (5, 4, 2)]
    options = {"size": len, "differentiation": "reverse"}
    expected = sum(
        hessian(model, F.cross_entropy, [(x[:, None], y[None])], **options).dense()
        for x, y in zip(sequences, target, strict=True)
    )
    packed = nn.utils.rnn.pack_sequence(sequences)
    H = hessian(model, F.cross_entropy, [(packed, target)], **options)
    torch.testing.assert_close(H.dense(), expected / 3, rtol=1e-4, atol=1e-6)


class NamedInputs(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return self.model(input)


def test_selected_parameters():
    model, data = mlp().double(), batches(4)
    whole = hessian(model, F.cross_entropy, data, differentiation="reverse").dense()
    head = hessian(model, F.cross_entropy, data, params=["3.weight", "3.bias"])
    assert_equals_matrix(head, whole[25:, 25:])
    same = hessian(model, F.cross_entropy, data, params=lambda name: name.startswith("3."))
    assert same.shape == (18, 18)
    with pytest.raises(ValueError, match="no parameter named 'nope'"):
        hessian(model, F.cross_entropy, data, params=["nope"])


def test_linear_and_unused_parameters_have_no_curvature():
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Parameter(torch.ones(2))
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.used

    data = [torch.randn(5, 2)]
    for mode in ("reverse", "forward"):
        for build in (hessian, gauss_newton):
            H = build(Linear(), torch.mean, data, differentiation=mode)
            assert not (H @ torch.ones(5)).any()


def test_auto_selects_a_mode_and_falls_back_without_a_forward_derivative():
    H = hessian(mlp().double(), F.cross_entropy, batches(4))
    assert H.info.differentiation == "auto"
    H @ torch.ones(43)
    assert H.info.differentiation == "auto"  # three of four trials done
    H @ torch.ones(43)
    assert H.info.differentiation in ("reverse", "forward")

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    model = nn.Linear(4, 1).double()

    def loss(output, target):
        return Square.apply(output).mean()

    H = hessian(model, loss, batches(4))
    x = torch.cat([torch.cat([x, torch.ones(len(x), 1)], 1) for x, _ in H.objective.batches])
    torch.testing.assert_close(H.dense(), 2 * x.T @ x / len(x), rtol=0, atol=1e-12)
    assert H.info.differentiation == "reverse"


def test_auto_selects_the_faster_mode(monkeypatch):
    clock = iter([0, 9, 10, 12, 20, 21, 30, 35])  # second trials: reverse 1 s, forward 5 s
    monkeypatch.setattr("wsam.curvature.matvec.time.perf_counter", lambda: next(clock))
    H = hessian(mlp().double(), F.cross_entropy, [batches(4)[0]] * 4)
    H @ torch.ones(43)
    assert H.info.differentiation == "reverse"


class GeneratedBatches:
    """Batches created during iteration; records the largest number alive at once."""

    def __init__(self, count: int) -> None:
        self.count, self.alive, self.most = count, weakref.WeakSet(), 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.count):
            generator = torch.Generator().manual_seed(index)
            x = torch.randn(8, 4, generator=generator).double()
            self.alive.add(x)
            self.most = max(self.most, len(self.alive))
            yield x, torch.arange(8) % 3


def test_memory_does_not_grow_with_the_number_of_batches():
    most = []
    for count in (3, 12):
        data = GeneratedBatches(count)
        for build in (hessian, gauss_newton):
            build(mlp().double(), F.cross_entropy, data) @ torch.ones(43)
        most.append(data.most)
    assert most[0] == most[1] <= 3


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", MODES)
def test_cuda_equals_the_cpu_with_batches_on_the_cpu(case, mode):
    model, data = case
    vectors = torch.randn(sum(p.numel() for p in model.parameters() if p.requires_grad), 2).double()
    expected = [build(model, F.cross_entropy, data) @ vectors for build in (hessian, gauss_newton)]
    model.cuda()
    if mode == "forward" and isinstance(model, Recurrent):
        # torch's LSTM has no forward derivative on CUDA; "auto" falls back to reverse mode.
        with pytest.raises(NotImplementedError, match="forward AD"):
            hessian(model, F.cross_entropy, data, differentiation=mode) @ vectors
        return
    with torch.backends.cudnn.flags(enabled=not isinstance(model, Recurrent)):
        for build, right in zip((hessian, gauss_newton), expected, strict=True):
            H = build(model, F.cross_entropy, data, differentiation=mode)
            found = H @ vectors
            assert found.is_cuda
            assert not H.info.tf32  # float64
            torch.testing.assert_close(found.cpu(), right, rtol=0, atol=1e-8)
