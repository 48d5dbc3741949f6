"""Measure the cost of a run: trained values, training state, and the peak memory.

On a CPU the system records one peak, which includes the memory of Python and its libraries; it is reset when a run
begins, after free memory was returned.
"""

from __future__ import annotations

import copy
import ctypes
import resource
import sys
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from frozencore.adapter.layer import layer_shape
from frozencore.device import memory_of, resolve_device
from frozencore.files.fingerprint import stored_tensors
from frozencore.tune.adapters import add_adapter, targeted_layers
from frozencore.tune.config_parts import ModelConfig
from frozencore.tune.load import Base, load_config, load_tokenizer, run_dtype, without_weights
from frozencore.tune.methods import METHODS, MethodConfig, Targets
from frozencore.tune.training.callbacks import total_bytes
from frozencore.unwrapped_model import base_tensors

ADAM_STATES = 2  # first and second moment


def training_state_bytes(num_parameters: int) -> int:
    """Bytes of float32 gradients and AdamW states beside the parameters: 12 per trainable value."""
    return num_parameters * torch.float32.itemsize * (1 + ADAM_STATES)


def num_trainable(model: nn.Module) -> int:
    """The number of values that train at the same time."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def model_bytes(model: nn.Module) -> int:
    """Bytes of the base model's loaded weights, without adapters; tied weights count once."""
    return total_bytes(stored for _, tensor in base_tensors(model) for stored in stored_tensors(tensor))


STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
FORGET_THE_PEAK = "5"


class PeakMemory:
    """The peak memory of a run since this was made: of the model's GPUs, else of the process.

    Args:
        model: The loaded base model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)
        if not self._devices:
            _give_back_what_is_free()
            with suppress(OSError):  # not Linux, or not permitted: the peak is that of the process's life
                CLEAR_REFS.write_text(FORGET_THE_PEAK)

    @property
    def largest(self) -> int:
        """The largest peak in bytes."""
        return max(map(torch.cuda.max_memory_allocated, self._devices), default=0) or process_peak_bytes()


def process_peak_bytes() -> int:
    """The peak resident memory of this process, over its life or since the last reset."""
    peak = _status("VmHWM")  # rusage would include the parent process's peak
    if peak is not None:
        return peak
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def _status(field: str) -> int | None:
    """Read a field of this process's status in bytes; None if the file or the field is missing."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)


def _give_back_what_is_free() -> None:
    """Return freed memory from glibc to the system; does nothing with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


LARGE_BLOCK = 2**25  # glibc gives larger blocks back at once
HEAP = 1.65  # measured: smaller blocks leave holes, so that the heap is this much larger than what is alive in it


def outline_of(config: ModelConfig) -> Base:
    """A configured model without weights, on the meta device in the dtype of the run, with its tokenizer."""
    architecture = load_config(config.name)
    model, saved = without_weights(architecture), architecture.get_text_config().dtype
    dtype = saved if isinstance(saved, torch.dtype) else torch.float32
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
    elif getattr(architecture, "quantization_config", None) is None:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        dtype = run_dtype(dtype, num_parameters, resolve_device(config.device))
    return Base(model.to(dtype=dtype), load_tokenizer(config.name))


Pass = tuple[int, int]
"""The rows of a pass, and the tokens of each."""


def estimate_bytes(config: MethodConfig, base: nn.Module, targets: Targets, step: Pass, calibration: Pass) -> int:
    """Estimate the peak memory of a run in bytes, above that of Python and its libraries.

    A pass of the longest rows runs on tensors without data, in which the bytes that are alive at once are counted. A
    frozen core has the graph of a LoRA of its rank, as has a method that only starts a LoRA elsewhere.

    Args:
        base: The base model on the meta device; the caller's model is not changed.
        step, calibration: The largest pass of the training, and of the calibration if the method reads data.
    """
    method = config.entry
    of_graph = METHODS["lora"] if {*method.trains} <= {"core", "factors"} else method
    with torch.device("meta"):
        options = replace(config, target_modules=targets, core={}, basis=None, start_from=None)
        model = add_adapter(of_graph, copy.deepcopy(base), options)
    layers = targeted_layers(base, targets) if method.has_bases else ()
    shapes = [layer_shape(base.get_submodule(name)) for name in layers]
    trained = sum(min(config.r, *shape) ** 2 for shape in shapes) if method.has_bases else num_trainable(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        weights = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())
        }
        model.eval()  # trained without dropout
        peaks = [ADAM_STATES * trained * torch.float32.itemsize + _peak_of(model, step, weights)]
        if needs := config.moments_needed:
            moments = sum(
                m * n * ("cross" in needs) + n * n * ("input_outer" in needs) + m * m * ("error_outer" in needs)
                for m, n in shapes
            )
            peaks.append(moments * torch.float32.itemsize + _peak_of(model, calibration, weights))
    return sum(weights.values()) + max(peaks)


def _peak_of(model: nn.Module, rows: Pass, weights: Iterable[int]) -> int:
    ids = torch.zeros(rows, dtype=torch.long)
    with LiveBytes(weights) as live:
        model(input_ids=ids, labels=ids).loss.backward()
    return round(live.peak)


class LiveBytes(TorchDispatchMode):
    """Count the bytes that the tensors made inside take at once, as the heap of a CPU counts them.

    Args:
        others: Storages that are not counted.
    """

    def __init__(self, others: Iterable[int]) -> None:
        super().__init__()
        self.now = self.peak = 0.0
        self._sizes = dict.fromkeys(others, 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = size * (HEAP if size < LARGE_BLOCK else 1)
            self.now += self._sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


SHARE_OF_MEMORY = 0.5  # of the memory beside the weights; the rest is for fragmentation, scoring and other programs
LOGIT_BYTES = 12  # per token and vocabulary entry: logits, in float32, and their gradient


def rows_at_once(num_rows: int, longest: int, model: Any) -> int:
    """The largest divisor of a step's rows that fits into the memory of the model's device, if all are the longest row.

    It uses the device's total memory, not the free memory, so that a resumed run splits its steps as before.

    Args:
        longest: Tokens of the longest training row.
        model: A model of transformers, adapted or not.
    """
    device = next(model.parameters()).device
    place = resolve_device("auto") if device.type == "meta" else device
    # on a CPU more rows than in float32 are not faster, and would take the memory that a narrower dtype saves
    least = torch.float32.itemsize if place.type == "cpu" else 0
    weights = sum(p.numel() * max(p.element_size(), least * p.is_floating_point()) for p in model.parameters())
    fitting = SHARE_OF_MEMORY * (memory_of(place) - weights) // row_bytes(longest, model, least)
    return next((n for n in range(num_rows, 1, -1) if num_rows % n == 0 and n <= fitting), 1)


def row_bytes(length: int, model: Any, least: int = 0) -> int:
    """Estimate, from above, the bytes that a row keeps for the backward pass through frozen layers.

    Args:
        least: Bytes that each value counts at least.
    """
    config = model.config.get_text_config()
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    of_a_layer = 12 * hidden + 5 * inner + config.num_attention_heads * length
    values = config.num_hidden_layers * of_a_layer * max(next(model.parameters()).element_size(), least)
    return length * (values + config.vocab_size * LOGIT_BYTES)
