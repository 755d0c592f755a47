"""A captured step equals an eager one, and what cannot be captured is rejected."""

import contextlib
import copy
import gc
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import wsam
from wsam.accel import cuda_graph
from wsam.accel.graph_inputs import GraphScalars
from wsam.rule import Reuse
from wsam.schedule import Between, Every, NormAbove, Warmup

STEPS = 8


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, 5)).cuda()


def batches(count: int, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, size, 3, 8, 8, generator=generator).cuda()
    y = torch.randint(0, 5, (count, size), generator=generator).cuda()
    return list(zip(x, y, strict=True))


BASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}
# Each method over one base, and each base with a rule that keeps g0 and one that does not.
CASES = [
    *(("wsam", base) for base in BASES),
    *(("sam", base) for base in BASES),
    ("coupled_wsam", "adamw"),
    ("gsam", "sgd"),
    ("esam", "adamw"),
    ("asam", "sgd"),
    ("fisher_sam", "adamw"),
]


def loss_of(opt, model):
    def loss(x: Tensor, y: Tensor) -> Tensor:
        losses = cross_entropy(model(x), y, reduction="none")
        return opt.select(losses) if hasattr(opt, "select") else losses.mean()

    return loss


def eager(opt, model, x, y):
    def closure():
        value = loss_of(opt, model)(x, y)
        value.backward()
        return value

    if not isinstance(opt, wsam.SharpnessAware):
        opt.zero_grad()
        value = closure()
        opt.step()
        return value
    return opt.step(closure)


def compare(make, dropout=0.0, data=None, adjust=lambda opt, t: None, tolerance=2e-5, fuse=False):
    torch.backends.cudnn.allow_tf32 = False
    data = data or batches(STEPS)
    models = [network(dropout), network(dropout)]
    opts = [make(model) for model in models]
    step = wsam.capture(opts[1], loss_of(opts[1], models[1]), *data[0], fuse=fuse)
    for t, (x, y) in enumerate(data):
        torch.manual_seed(10 + t)
        adjust(opts[0], t)
        first = eager(opts[0], models[0], x, y)
        torch.manual_seed(10 + t)
        adjust(opts[1], t)
        second = step(x, y)
        torch.testing.assert_close(second, first.float(), rtol=1e-4, atol=1e-5)
    for one, two in zip(
        models[0].state_dict().values(), models[1].state_dict().values(), strict=True
    ):
        torch.testing.assert_close(two, one, rtol=tolerance, atol=tolerance)
    return opts, step


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnCuda:
    @pytest.mark.parametrize("fuse", [False, True])
    @pytest.mark.parametrize(("method", "base"), CASES)
    def test_methods(self, method, base, fuse):
        compare(lambda m: wsam.create(method, BASES[base](m.parameters()), model=m), fuse=fuse)

    @pytest.mark.parametrize(("base", "fuse"), [("sgd", False), *((base, True) for base in BASES)])
    def test_lean(self, base, fuse):
        options = {"lean": True, "precondition": False, "gamma": 0.6}
        compare(lambda m: wsam.WSAM(BASES[base](m.parameters()), model=m, **options), fuse=fuse)

    @pytest.mark.parametrize("method", ["sam", "wsam", "gsam", "esam"])
    def test_without_model(self, method):
        compare(lambda m: wsam.create(method, BASES["sgd"](m.parameters())))

    def test_plain_base(self):
        compare(lambda m: BASES["sgd"](m.parameters()))

    def test_hooks_of_a_plain_base_run_once(self):
        model, data = network(), batches(STEPS)
        opt, calls = BASES["sgd"](model.parameters()), []
        opt.register_step_post_hook(lambda *_: calls.append(1))
        step = wsam.capture(opt, loss_of(opt, model), *data[0])
        for x, y in data:
            step(x, y)
        assert len(calls) == STEPS

    @pytest.mark.parametrize("geometry", [wsam.Adaptive(), wsam.Fisher(), wsam.Masked(0.5)])
    def test_geometry(self, geometry):
        compare(lambda m: wsam.WSAM(BASES["sgd"](m.parameters()), geometry=geometry, model=m))

    @pytest.mark.parametrize("fuse", [False, True])
    @pytest.mark.parametrize("base", ["sgd", "adamw"])
    @pytest.mark.parametrize("when", [Every(3), Every(2) & Between(6)])
    @pytest.mark.parametrize("reuse", [Reuse(), Reuse(scale_by_norm=True, average=0.5)])
    def test_reused_sharpness(self, reuse, when, base, fuse):
        """Both kinds of step are recorded once, and replayed in turn."""
        _, step = compare(
            lambda m: wsam.WSAM(
                BASES[base](m.parameters()), gamma=0.5, when=when, reuse=reuse, model=m
            ),
            data=batches(18),
            fuse=fuse,
        )
        recordings = step._graph._recordings.values()
        kinds = 2 if when == Every(3) else 3  # and steps of the base before the first two-pass step
        assert len(recordings) == kinds
        assert all(r.graph is not None for r in recordings)
        by_kernel = [r.backend.stepped_base for r in recordings if r.backend is not None]
        assert sum(by_kernel) == (2 if fuse and reuse == Reuse() else 0)

    @pytest.mark.parametrize("fuse", [False, True])
    @pytest.mark.parametrize(
        ("method", "options", "kinds"),
        [
            ("looksam", {"n": 3}, 2),
            ("looksam", {"n": 3, "per_tensor": True}, 2),
            ("vasso", {}, 1),
            ("friendly_sam", {}, 1),
            ("msam", {"rho": 0.05}, 1),
        ],
    )
    def test_methods_with_a_memory(self, method, options, kinds, fuse):
        _, step = compare(
            lambda m: wsam.create(method, BASES["sgd"](m.parameters()), model=m, **options),
            data=batches(12),
            fuse=fuse,
        )
        assert len(step._graph._recordings) == kinds

    def test_clip(self):
        compare(lambda m: wsam.WSAM(BASES["sgd"](m.parameters()), max_norm=0.1, model=m))

    def test_dropout_masks_repeat(self):
        """With d = 0 the losses of both passes are equal only if their dropout masks are."""
        model, data = network(0.5), batches(STEPS)
        opt = wsam.SAM(BASES["sgd"](model.parameters()), rho=1e-12, model=model)
        step = wsam.capture(opt, loss_of(opt, model), *data[0])
        for x, y in data:
            step(x, y)
            assert abs(opt.sharpness.item()) < 1e-6
        losses = [step(*data[0]).item() for _ in range(3)]
        assert len(set(losses)) == 3  # masks differ from step to step

    @pytest.mark.parametrize("base", ["sgd", "adamw"])
    @pytest.mark.parametrize("options", [{}, {"lean": True}, {"max_norm": 0.1}, {"when": Every(2)}])
    def test_scheduled_momentum(self, base, options):
        """As by OneCycleLR. It needs no new recording if a kernel steps the base."""

        def adjust(opt, t):
            for group in opt.param_groups:
                momentum = 0.95 - 0.05 * t
                group["weight_decay"] = 1e-3 * (1 + t)
                if "betas" in group:
                    group["betas"] = (momentum, 0.99)
                else:
                    group["momentum"] = momentum

        def make(m):
            precondition = False if "lean" in options else "auto"
            form = {"gamma": 0.6, "precondition": precondition}
            return wsam.WSAM(BASES[base](m.parameters()), model=m, **form, **options)

        _, step = compare(make, adjust=adjust, fuse=True)
        recordings = step._graph._recordings
        recorded = [r for r in recordings.values() if r.graph is not None]
        by_kernel = [r for r in recorded if r.base_numbers is None]
        assert len(by_kernel) == (0 if "max_norm" in options else 1)
        assert (len(recordings) == 1) is (not options or "lean" in options)

    def test_the_number_of_recordings_is_limited(self, monkeypatch):
        monkeypatch.setattr(cuda_graph, "RECORDINGS", 3)
        model, data = network(), batches(STEPS)
        opt = wsam.WSAM(BASES["sgd"](model.parameters()), model=model)
        step = wsam.capture(opt, loss_of(opt, model), *data[0])
        for size in range(3, 6):
            step(*(x[:size] for x in data[0]))
        with pytest.warns(wsam.WsamWarning, match="least recently used are dropped"):
            step(*data[0])
        assert len(step._graph) == 3

    def test_scheduled_hyperparameters(self):
        def adjust(opt, t):
            for group in opt.param_groups:
                group["lr"], group["sam_rho"], group["sam_gamma"] = 0.1 / (t + 1), 0.01 * t, 0.1 * t

        opts, _ = compare(lambda m: wsam.WSAM(BASES["sgd"](m.parameters()), model=m), adjust=adjust)
        assert opts[0].param_groups[0]["sam_step"] == opts[1].param_groups[0]["sam_step"] == STEPS

    @pytest.mark.parametrize("reuse", [False, True])
    @pytest.mark.parametrize("fuse", [False, True])
    def test_schedules_and_intervals(self, fuse, reuse):
        def make(m):
            base = BASES["sgd"](m.parameters())
            when = Every(2) & Between(4)
            return wsam.WSAM(base, gamma=Warmup(0.9, 9), when=when, reuse=reuse, model=m)

        compare(make, data=batches(16), fuse=fuse)

    def test_several_shapes(self):
        data = [*batches(5), *batches(5, 8), *batches(3)]
        compare(lambda m: wsam.WSAM(BASES["sgd"](m.parameters()), model=m), data=data)

    def test_loaded_states(self):
        data = batches(12)
        make = lambda m: wsam.WSAM(BASES["sgd"](m.parameters()), model=m)  # noqa: E731
        model, other = network(), network()
        opt, twin = make(model), make(other)
        step = wsam.capture(opt, loss_of(opt, model), *data[0])
        for x, y in data[:6]:
            step(x, y)
        saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
        for x, y in data[6:]:
            step(x, y)
        wanted = [p.detach().clone() for p in model.parameters()]
        other.load_state_dict(saved[0])
        twin.load_state_dict(saved[1])
        again = wsam.capture(twin, loss_of(twin, other), *data[0])
        for x, y in data[6:]:
            again(x, y)
        torch.testing.assert_close(list(other.parameters()), wanted, rtol=2e-5, atol=2e-5)
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        for x, y in data[6:]:
            step(x, y)
        torch.testing.assert_close(list(model.parameters()), wanted, rtol=2e-5, atol=2e-5)

    def test_a_compiled_model_under_autocast(self):
        data = batches(STEPS)
        model = network()
        opt = wsam.WSAM(BASES["sgd"](model.parameters()), model=model)
        compiled = torch.compile(model)

        def loss(x, y):
            with torch.autocast("cuda", torch.bfloat16):
                return cross_entropy(compiled(x).float(), y)

        step = wsam.capture(opt, loss, *data[0])
        losses = [step(*data[0]).item() for _ in range(30)]
        assert losses[-1] < 0.5 * losses[0]
        assert int(model[1].num_batches_tracked) == 30

    def test_schedulers_and_step_hooks(self, recwarn):
        model, data = network(), batches(STEPS)
        opt = wsam.WSAM(BASES["sgd"](model.parameters()), model=model)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        calls = []
        opt.register_step_post_hook(lambda *_: calls.append(1))
        step = wsam.capture(opt, loss_of(opt, model), *data[0])
        for x, y in data:
            step(x, y)
            scheduler.step()
        assert len(calls) == STEPS
        assert opt.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** (STEPS // 2))
        assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]

    @pytest.mark.parametrize("options", [{"nonfinite": "skip"}, {"when": NormAbove()}])
    def test_rejected_options(self, options):
        model, (batch, *_) = network(), batches(1)
        opt = wsam.WSAM(BASES["sgd"](model.parameters()), **options)
        with pytest.raises(ValueError, match="captured"):
            wsam.capture(opt, loss_of(opt, model), *batch)
        base = torch.optim.Adafactor(model.parameters())
        with pytest.raises(ValueError, match="Adafactor cannot be captured"):
            wsam.capture(wsam.SAM(base), loss_of(opt, model), *batch)


def test_capture_needs_cuda():
    model = nn.Linear(2, 2)
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="one CUDA device, they are on cpu"):
        wsam.capture(opt, lambda x: model(x).sum(), torch.ones(2, 2))


def test_fuse_needs_triton(monkeypatch):
    monkeypatch.setattr(cuda_graph, "triton_is_installed", lambda: False)
    model = nn.Linear(2, 2)
    opt = wsam.WSAM(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="needs Triton"):
        wsam.capture(opt, lambda x: model(x).sum(), torch.ones(2, 2), fuse=True)


def step_on_cpu(opt):
    """A graphed step that finds its recordings but never records."""
    step = cuda_graph.GraphedStep.__new__(cuda_graph.GraphedStep)
    step._params, step._modules = [p for g in opt.param_groups for p in g["params"]], []
    step.opt, step.sharp, step._device, step._fuse = opt, None, torch.device("cpu"), False
    step._recordings, step._is_full, step._pool = {}, False, "pool"
    step._scalars = GraphScalars(opt, step._device)
    return step


def test_steps_that_reuse_have_their_own_recording():
    model = nn.Linear(2, 1)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_on_cpu(wsam.WSAM(base, when=Every(2), reuse=True))
    step.sharp = step.opt
    x = torch.ones(3, 2)
    alone, chosen = (step._recording([x], None, chosen=choice) for choice in (False, True))
    for p in model.parameters():
        step.opt.state[p]["sam_kept"] = torch.zeros_like(p)
    reusing = step._recording([x], None, chosen=False)
    assert reusing is not alone
    assert step._recording([x], None, chosen=True) is chosen
    assert step._recording([x], None, chosen=False) is reusing


def test_the_least_recently_used_recording_is_dropped(monkeypatch):
    monkeypatch.setattr(cuda_graph, "RECORDINGS", 4)
    step = step_on_cpu(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9))
    usual = step._recording([torch.empty(100)], None, chosen=True)
    usual.graph, usual.base_numbers = "graph", step._scalars.base_numbers()
    for size in range(9):
        expected = pytest.warns(wsam.WsamWarning, match="least recently used are dropped")
        with expected if size == 3 else contextlib.nullcontext():
            step._recording([torch.empty(size)], None, chosen=True)
        assert step._recording([torch.empty(100)], None, chosen=True) is usual
    assert (len(step._recordings), step._pool) == (4, "pool")
    for size in range(4):
        step._recording([torch.empty(50 + size)], None, chosen=True)
    assert step._pool is None, "its last graph was dropped"


def test_a_recording_with_constant_numbers_is_not_used_for_others():
    opt = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    step, batch = step_on_cpu(opt), [torch.empty(3)]
    first = step._recording(batch, None, chosen=True)
    opt.param_groups[0]["momentum"] = 0.8
    assert step._recording(batch, None, chosen=True) is first, "not recorded yet"
    first.graph, first.base_numbers = "graph", step._scalars.base_numbers()
    assert step._recording(batch, None, chosen=True) is first
    opt.param_groups[0]["momentum"] = 0.7
    other = step._recording(batch, None, chosen=True)
    assert other is not first
    first.base_numbers = None  # as if a kernel had stepped the base
    assert step._recording(batch, None, chosen=True) is first
    assert step._recording(batch, None, chosen=False) is not first


def test_frozen_weights_modes_and_constants_lead_to_other_recordings():
    weight, layer = nn.Parameter(torch.ones(2)), nn.Dropout()
    step = step_on_cpu(torch.optim.SGD([weight], lr=0.1))
    step._modules = [layer]
    leaves, structure = cuda_graph.flatten_batch((torch.empty(3),), {"flag": True})
    found = [step._recording(leaves, structure, chosen=True)]
    weight.requires_grad_(False)
    found.append(step._recording(leaves, structure, chosen=True))
    layer.eval()
    found.append(step._recording(leaves, structure, chosen=True))
    leaves, structure = cuda_graph.flatten_batch((torch.empty(3),), {"flag": False})
    found.append(step._recording(leaves, structure, chosen=True))
    leaves, structure = cuda_graph.flatten_batch((torch.empty(3),), {"other": False})
    found.append(step._recording(leaves, structure, chosen=True))
    assert len(set(map(id, found))) == len(step._recordings) == 5
    assert step._recording(leaves, structure, chosen=True) is found[-1]


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_while_recording(enabled, monkeypatch):
    """Freeing another CUDA graph would invalidate the recording."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    step, found = step_on_cpu(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)), []
    step._rng, step._stream = MagicMock(), None
    step._step = lambda *_: found.append(gc.isenabled())
    recording = step._recording([torch.empty(3)], None, chosen=True)
    (gc.enable if enabled else gc.disable)()
    try:
        step._record(recording, chosen=True)
        assert (found, gc.isenabled()) == ([False], enabled)
    finally:
        gc.enable()


def test_a_batch_with_other_objects_is_refused():
    step = step_on_cpu(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
    with pytest.raises(TypeError, match="contains a object: pass tensors"):
        step._recording(*cuda_graph.flatten_batch((object(),), {}), chosen=True)
