"""Hashes of weights, to check that two artefacts belong together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from frozencore.options import fingerprint_options
from frozencore.unwrapped_model import base_of, base_tensors

_NOT_OF_A_MODEL = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


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


def fingerprints_of(model: torch.nn.Module) -> dict[str, str]:
    """The hash of a model's weights, and of its configuration.

    Where the configuration is from, its dtype, and what wrote it do not count.
    """
    config = json.loads(base_of(model).config.to_json_string())
    content = {name: value for name, value in config.items() if name not in _NOT_OF_A_MODEL}
    return {"model": fingerprint_model(model), "config": fingerprint_options(content)}
