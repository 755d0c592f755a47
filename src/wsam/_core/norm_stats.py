"""Running statistics between the two passes: the second pass must not change them.

Statistics of BatchNorm and similar layers move in the first pass only. They are copied before the
second pass and copied back after it, which is right for every kind of layer and momentum. The power
iteration of spectral norms is paused, so that both passes compute the same function. A step that is
skipped restores the statistics from before its first pass in the same way.
"""

import sys
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils.hooks import RemovableHandle

from wsam._core.validation import warn

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
Statistic = tuple[dict[str, Any], str, Tensor]
"""A module's buffers, and the name and value of one of them."""


class NormStats:
    """Copies the running statistics of a model before a pass, and restores them after it.

    With `model`, all its layers are found before the pass, and a global forward hook rejects others
    until the model has run in training mode. Without it, a hook finds each module when it first runs
    in the pass. Hooks are registered between `hold` and `release` only.

    Args:
        model: contains every module that runs in training mode; None to find modules by a hook.
        pause_spectral_norms: also pause their power iteration, so that the pass computes the same
            function as the one before.
    """

    def __init__(self, model: nn.Module | None, *, pause_spectral_norms: bool = True) -> None:
        self._model = model
        self._model_is_checked = False
        self._pauses_spectral_norms = pause_spectral_norms
        self.copies = StatCopies([])
        """Those of the model's layers, whose memory a CUDA graph continues to use."""
        self._modules: list[nn.Module] = []  # the model's
        self._saved: list[StatCopies] = []  # `copies`, then those of modules that the hook found
        self._paused: list[tuple[Any, int]] = []
        self._seen: set[int] = set()
        self._found_parameters = False
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _remove_hooks, self._hooks)
        self._thread = 0
        self._warned = False

    def hold(self) -> None:
        """Copy the statistics. Call before the pass."""
        _remove_hooks(self._hooks)
        # The model may have changed since the last time.
        self._modules = list(self._model.modules()) if self._model is not None else []
        layers = [m for m in self._modules if m._buffers]
        found = _statistics(layers)
        if not self.copies.match(found):
            self.copies = StatCopies(found)
        self.copies.save()
        self._saved = [self.copies]
        self._pause_power_iteration(layers)
        if self._model is None:
            self._seen.clear()
            self._found_parameters = False
            self._add_hook(self._on_forward)
        elif not self._model_is_checked and not _compiled_graphs():  # a hook compiles them again
            self._add_hook(self._reject_unknown_layer)

    def _add_hook(self, method: Any) -> None:
        self._thread = threading.get_ident()
        # `register_module_forward_pre_hook` returns the handle after it has added the hook; a Ctrl-C
        # in between would leave the hook for good.
        handle = RemovableHandle(_global_forward_pre_hooks)
        self._hooks.append(handle)
        _global_forward_pre_hooks[handle.id] = _weak_hook(method)

    def discard(self) -> None:
        """End without restoring anything."""
        _remove_hooks(self._hooks)
        self._saved = []

    def release(self) -> None:
        """Restore the statistics. May be called twice."""
        if self._hooks and self._model is None:
            self._warn_if_compiled()
        _remove_hooks(self._hooks)
        for norm, iterations in self._paused:
            if norm.n_power_iterations == 0:  # otherwise the closure has set another number
                norm.n_power_iterations = iterations
        self._paused = []
        with torch.no_grad():
            for saved in reversed(self._saved):
                saved.restore()
            if self._saved:
                self.copies.rebind()
        self._saved = []

    def _warn_if_compiled(self) -> None:
        """Warn once if compiled code may have run layers without calling the hook."""
        if self._found_parameters or self._warned or not _compiled_graphs():
            return
        self._warned = True
        warn(
            "code was compiled, and no module with parameters was found in the second pass: if a "
            "compiled function runs normalization layers, their running statistics move twice a step; "
            "pass model="
        )

    def _pause_power_iteration(self, modules: list[nn.Module]) -> None:
        for norm in _spectral_norms(modules) if self._pauses_spectral_norms else ():
            if norm.n_power_iterations:
                self._paused.append((norm, norm.n_power_iterations))
                norm.n_power_iterations = 0

    def _reject_unknown_layer(self, module: nn.Module, args: Any) -> None:
        """Raise if a layer that is not part of the model would change in the second pass, too."""
        if threading.get_ident() != self._thread or not module.training:
            return
        norms = _spectral_norms([module]) if self._pauses_spectral_norms else []
        iterates = any(norm.n_power_iterations for norm in norms) and module not in self._modules
        if iterates or not self.copies.contain(_statistics([module])):
            self._model_is_checked = False
            raise RuntimeError(
                f"the closure runs a {type(module).__name__} in training mode that is not part of "
                "model=, so its running statistics or power iteration would advance twice a step: "
                "pass a module that contains all that the closure runs, such as "
                "nn.ModuleList([a, b]), or omit model="
            )
        # A pass without the model, or in evaluation mode, may not run the other layers as usual.
        self._model_is_checked = self._model_is_checked or module in self._modules

    def _on_forward(self, module: nn.Module, args: Any) -> None:
        """Copy the statistics of a module, and of all its parts, when it first runs."""
        if id(module) in self._seen or threading.get_ident() != self._thread:
            return
        parts = [part for part in module.modules() if id(part) not in self._seen]
        self._seen.update(map(id, parts))
        if any(part._parameters for part in parts):  # a loss has none
            self._found_parameters = True
        found = StatCopies(_statistics(parts))
        with torch.no_grad():
            found.save()
        self._saved.append(found)
        self._pause_power_iteration(parts)


class StatCopies:
    """Copies of the statistics that `_statistics` returned."""

    def __init__(self, found: list[Statistic]) -> None:
        self._found = found
        lists: dict[Any, list[Tensor]] = {}
        for _, _, b in found:
            lists.setdefault((b.dtype, b.device), []).append(b)
        self._pairs = [(bs, [torch.empty_like(b) for b in bs]) for bs in lists.values()]

    def match(self, found: list[Statistic]) -> bool:
        """Whether these are copies of the same buffers of the same modules."""
        return _ids(found) == _ids(self._found)

    def contain(self, found: list[Statistic]) -> bool:
        """Whether these tensors are all among those that are copied."""
        return {id(b) for _, _, b in self._found}.issuperset(id(b) for _, _, b in found)

    def save(self) -> None:
        """Copy the current statistics."""
        for tensors, kept in self._pairs:
            torch._foreach_copy_(kept, tensors)

    def restore(self) -> None:
        """Copy them back."""
        for tensors, kept in self._pairs:
            torch._foreach_copy_(tensors, kept)

    def rebind(self) -> None:
        """Give modules their buffers back, where they have replaced them by new tensors."""
        for buffers, name, tensor in self._found:
            if buffers[name] is not tensor:
                buffers[name] = tensor


def _statistics(modules: Iterable[nn.Module]) -> list[Statistic]:
    """Return the modules' statistics. Uninitialized and read-only buffers are left out."""
    dicts = [module._buffers for module in modules]  # those of TorchScript have no `get`
    found = [(d, name, d[name]) for d in dicts for name in STATISTICS if name in d]
    return [
        (d, name, b)
        for d, name, b in found
        if b is not None and not is_lazy(b) and not b.is_inference()
    ]


def _ids(found: list[Statistic]) -> list[tuple[int, int]]:
    return [(id(buffers), id(b)) for buffers, _, b in found]


def _spectral_norms(modules: Iterable[nn.Module]) -> list[Any]:
    """Return all spectral norms: parametrizations, and hooks of the older kind."""
    found: list[Any] = []
    for module in modules:
        if isinstance(module, _SpectralNorm) and module._buffers:  # that of a vector has none
            found.append(module)
        found += [h for h in module._forward_pre_hooks.values() if isinstance(h, SpectralNorm)]
    return found


def _compiled_graphs() -> int:
    compiler = sys.modules.get("torch._dynamo.utils")
    return int(compiler.counters["stats"]["unique_graphs"]) if compiler is not None else 0


def _remove_hooks(hooks: list[RemovableHandle]) -> None:
    for handle in hooks:
        handle.remove()
    hooks.clear()


def _weak_hook(method: Any) -> Any:
    """Return a hook that does not keep the optimizer alive."""
    reference = weakref.WeakMethod(method)

    def hook(*arguments: Any) -> None:
        found = reference()
        if found is not None:
            found(*arguments)

    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and the import is slow
        return torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return hook
