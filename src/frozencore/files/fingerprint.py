"""Hashes of weights, batches and options, to check that two artefacts belong together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from frozencore.device import torch


def fingerprint_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order given; 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        if tensor.device.type != "meta":
            for stored in stored_tensors(tensor.detach()):
                flat = stored.cpu().contiguous().flatten()
                digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return digest.hexdigest()


def stored_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that store a tensor's values: itself, or codes and scales of a quantised tensor (torchao)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        yield from stored_tensors(getattr(tensor, attribute))


def fingerprint_model(model: torch.nn.Module) -> str:
    """SHA-256 of a base model's weights and buffers, without adapters and ``modules_to_save`` copies.

    A model with adapters has the hash of the plain model. Merged adapters change the weights and so the hash.
    """
    return fingerprint_tensors(sorted(base_tensors(model)))


def base_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The base model's weights and buffers, by their names without adapters."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    inner_of = {  # the attribute in which a PEFT module stores the plain module
        name: "base_layer" if isinstance(module, BaseTunerLayer) else "original_module"
        for name, module in base.named_modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
    }

    def belongs(name: str) -> bool:
        return not any(
            name.startswith(f"{layer}.") and not name.startswith(f"{layer}.{inner}.")
            for layer, inner in inner_of.items()
        )

    def plain(name: str) -> str:
        return name.replace(".base_layer.", ".").replace(".original_module.", ".")

    return ((plain(name), tensor) for name, tensor in base.state_dict().items() if belongs(name))


def fingerprint_batches(batches: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of a model's input: every tensor of every batch, in order."""
    return fingerprint_tensors(
        (f"{index}.{key}", batch[key])
        for index, batch in enumerate(batches)
        for key in sorted(batch)
        if isinstance(batch[key], torch.Tensor)
    )


def fingerprint_options(options: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON-like mapping, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(options, sort_keys=True, allow_nan=False).encode()).hexdigest()
