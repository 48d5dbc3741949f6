"""The plug-in that vLLM loads for basis models (:mod:`frozencore_basis_model`).

- ``FROZENCORE_TENANTS=tenants``: a request that names ``anna`` is answered by the core in ``tenants/anna/adapter``, as
  ``frozencore tune-many``, ``tune`` or ``compress`` wrote it, in values of any bits. vLLM asks for it only with
  ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``.
- On a CPU without compiling a slot is an r x r matrix in place of A = I and B = s·R.
- :class:`TenantWorker` takes tenants from memory.

vLLM reads adapters from folders, so a tenant is written as a LoRA on the ``core`` layers (A = I, B = s·R) into a cache
folder, ``FROZENCORE_CACHE``, under the hash of its content. A tenant that was replaced has another name, number and
path inside of vLLM: neither a slot nor cached keys and values of its earlier version can answer for it.

vLLM imports this file. It needs nothing of the package frozencore.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from tempfile import gettempdir, mkdtemp
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoConfig
from vllm.config import get_current_vllm_config_or_none
from vllm.lora import utils
from vllm.lora.layers import ReplicatedLinearWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry
from vllm.platforms import current_platform

import frozencore_basis_model
from frozencore_basis_model import ENTRY, PARTS

TENANTS, CACHE = "FROZENCORE_TENANTS", "FROZENCORE_CACHE"
CORE, CORE_KEY = PARTS[2], "frozencore_core_"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BITS = (8, 4, 2)
MOST_CACHED, STAYS_S = 4096, 3600.0
"""With more tenants in the cache folder, those are removed that no request has named for so many seconds."""


def register() -> None:
    """Register the model type, the slots of cores, and the resolver of tenants; repeated calls are harmless."""
    frozencore_basis_model.register()
    if CoreWithSlots not in utils._all_lora_classes:
        utils._all_lora_classes = (CoreWithSlots, *utils._all_lora_classes)
    if tenants := os.environ.get(TENANTS):
        _serve_tenants(Path(tenants), Path(os.environ.get(CACHE) or own_cache()))


def own_cache() -> Path:
    """The user's own folder for the LoRAs of tenants: what stands there is trusted."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "frozencore", "tenants")
    except RuntimeError:  # a user without a home, as in some containers
        return Path(gettempdir(), f"frozencore-tenants-{os.getuid()}")


# ---------------------------------------------------------------------------------- tenants in the folder of a training


@dataclass(frozen=True)
class Version:
    """A tenant as it was read.

    Attributes:
        file: Its weights, and ``stamp`` their size, time and inode then.
        folder: The LoRA in the cache.
    """

    file: Path
    stamp: tuple[int, int, int]
    folder: Path

    def is_current(self) -> bool:
        """Return whether the tenant and its LoRA are unchanged; the LoRA is then marked as used."""
        try:
            os.utime(self.folder)
            return _stamp(self.file) == self.stamp and (self.folder / WEIGHTS).is_file()
        except OSError:
            return False


class Tenants:
    """The folder of tenants, and the cache of their LoRAs.

    Args:
        folder: ``NAME/adapter`` or ``NAME`` is the adapter of a tenant.
    """

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self._entries: dict[str, Any] = {}

    def find(self, model: str, name: str) -> tuple[str, Version] | None:
        """Read a tenant of a basis model, and write its LoRA if it is not in the cache.

        Returns:
            The name of its version, and the version; None if there is no such tenant, or the model has no basis.

        Raises:
            ValueError: The tenant is damaged, has a core on another basis, or trains more than its core.
        """
        entry, file = self._entry(model), self._file(name)
        if entry is None or file is None:
            return None
        try:
            stamp, content = _stamp(file), file.read_bytes()
            cores = _cores(name, load(content), entry)
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise ValueError(f"The adapter of {name!r} is damaged ({error}). Save it again.") from error
        digest = hashlib.sha256(content).hexdigest()[:32]
        folder = self.cache / f"{entry['basis_id']}-{digest}"
        if not (folder / WEIGHTS).is_file():
            self._write(folder, cores)
        return f"{name}@{digest[:8]}", Version(file, stamp, folder)

    def _entry(self, model: str) -> dict[str, Any] | None:
        """The entry of a basis model's configuration: ids, ranks and scales."""
        if model not in self._entries:
            self._entries[model] = getattr(AutoConfig.from_pretrained(model), ENTRY, None)
        found: dict[str, Any] | None = self._entries[model]
        return found

    def _file(self, name: str) -> Path | None:
        """The weights of a tenant; None for an unknown name, and for one that leads to another folder."""
        if not name or name != Path(name).name or name.startswith(".") or not name.isprintable():
            return None
        places = (self.folder / name / "adapter", self.folder / name)
        return next((place / WEIGHTS for place in places if (place / WEIGHTS).is_file()), None)

    def _write(self, folder: Path, cores: Mapping[str, Tensor]) -> None:
        """Write a LoRA whole, in place of the tenants that nobody has asked for of late."""
        self.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        rank = max(map(len, cores.values()))
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": rank,
            "lora_alpha": rank, "target_modules": [CORE], "bias": "none",
        }  # fmt: skip
        aside = Path(mkdtemp(dir=self.cache, prefix="."))
        try:
            (aside / CONFIG).write_text(json.dumps(config), encoding="utf-8")
            (aside / WEIGHTS).write_bytes(save(_lora(cores, rank), metadata={"format": "pt"}))
            with suppress(OSError):  # another process of the server was first
                aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        known = [(one.stat().st_mtime, one) for one in self.cache.iterdir() if one.name[0] != "."]
        for used, one in sorted(known)[: max(0, len(known) - MOST_CACHED)]:
            if time.time() - used > STAYS_S:
                gone = one.with_name(f".{one.name}.{token_hex(4)}")
                with suppress(OSError):  # another process of the server was first
                    one.rename(gone)  # so that nothing is found half removed
                shutil.rmtree(gone, ignore_errors=True)


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _cores(name: str, tensors: Mapping[str, Tensor], entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """s·R (r x r) by layer of the core in an adapter's file, float32.

    The values are those of :mod:`frozencore.adapter.core`: r² for each layer, in the order of the names.
    """
    tensors = {key.removeprefix("base_model.model."): tensor for key, tensor in tensors.items()}  # transformers' prefix
    key = next((key for key in tensors if key.startswith(CORE_KEY) and "." not in key), None)
    if key is None:
        raise ValueError(f"The adapter of {name!r} is no frozen core. Export a LoRA, and serve it on its base model.")
    _require_basis(repr(name), key.removeprefix(CORE_KEY), entry)
    factors = (".frozencore_P", ".frozencore_Q")
    if more := next((other for other in tensors if not other.startswith(key) and not other.endswith(factors)), None):
        raise ValueError(f"{name!r} trains more than its core, as {more!r}. Merge it into a model of its own.")
    ranks, scales = dict(sorted(entry["ranks"].items())), entry["scales"]
    values, sizes = tensors[key], [r * r for r in ranks.values()]
    size = sum(sizes)
    bits = next((bits for bits in BITS if f"{key}.{bits}-bit" in tensors), None)
    if bits is not None:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        scales_here, num_bytes = tensors[f"{key}.{bits}-bit"], -(-size * bits // 8)
        if values.shape != (num_bytes,) or scales_here.shape != (len(sizes),):
            raise ValueError(f"The core of {name!r} is damaged: its codes or scales are too few or too many.")
        codes = ((values.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten()[:size]
        steps = scales_here.float().repeat_interleave(torch.tensor(sizes))
        values = (codes.float() + (0.5 - 2 ** (bits - 1))) * steps
    if not values.is_floating_point() or values.shape != (size,) or not bool(values.isfinite().all()):
        raise ValueError(f"A core on this basis is {size} finite values, but that of {name!r} is not. Save it again.")
    parts = zip(ranks.items(), values.split(sizes), strict=True)
    return {layer: (scales[layer] * R.double()).float().view(r, r) for (layer, r), R in parts}


def _lora(cores: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A = I and B = s·R, padded with zeros to one rank."""
    found: dict[str, Tensor] = {}
    for layer, R in cores.items():
        key, r = f"base_model.model.{layer}.{CORE}", len(R)
        found[f"{key}.lora_A.weight"] = torch.eye(rank, r)
        found[f"{key}.lora_B.weight"] = torch.nn.functional.pad(R, (0, rank - r))
    return found


class TenantResolver(LoRAResolver):
    """Find the tenant that a request names."""

    def __init__(self, tenants: Tenants) -> None:
        self.tenants = tenants
        self.versions: dict[str, Version] = {}

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
        """Find a tenant; vLLM gives it a number. An unknown name is vLLM's 404, a ``ValueError`` its 400."""
        found = self.tenants.find(base_model_name, lora_name)
        if found is None:
            return None
        name, version = found
        self.versions[name] = version
        return LoRARequest(lora_name=name, lora_int_id=1, lora_path=str(version.folder))


class CurrentRequests(dict[str, Any]):
    """The requests for adapters by the name that users give; one whose tenant has changed counts as unknown."""

    def __init__(self, requests: dict[str, Any], versions: Mapping[str, Version]) -> None:
        super().__init__(requests)
        self.versions = versions

    def __contains__(self, name: object) -> bool:
        if not super().__contains__(name):
            return False
        version = self.versions.get(self[name].lora_name)  # type: ignore[index]
        return version is None or version.is_current()


def _serve_tenants(folder: Path, cache: Path) -> None:
    """Let vLLM's server find tenants, and read one again whose folder has changed since."""
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels  # workers serve nothing

    if TenantResolver.__name__ in LoRAResolverRegistry.get_supported_resolvers():
        return
    resolver = TenantResolver(Tenants(folder, cache))
    LoRAResolverRegistry.register_resolver(TenantResolver.__name__, resolver)
    begin = OpenAIServingModels.__init__

    def begin_with_current_requests(self: Any, *args: Any, **given: Any) -> None:
        begin(self, *args, **given)
        _require_slots_of_cores(self.engine_client.vllm_config)
        self.lora_requests = CurrentRequests(self.lora_requests, resolver.versions)

    OpenAIServingModels.__init__ = begin_with_current_requests


def _require_slots_of_cores(config: Any) -> None:
    """Refuse a server of a basis model that has no slots in the ``core`` layers: the base model would answer."""
    targets = None if config.lora_config is None else config.lora_config.target_modules
    if targets is None or not hasattr(config.model_config.hf_config, ENTRY):
        return
    if all(target.rpartition(".")[2] != CORE for target in targets):
        raise ValueError(
            f"Tenants of a basis model are adapters of its layers called {CORE}, but --lora-target-modules names "
            f"{', '.join(targets) or 'none'}. Give --lora-target-modules {CORE}."
        )


# ------------------------------------------------------------------------------------------------------ slots of cores

_LARGEST_KEPT = 256  # cores of a batch that a layer keeps for the next one


class _Batch(NamedTuple):
    """The tenants of a batch: neighbouring rows of one tenant are a group if all groups have equally many rows."""

    cores: Tensor  # of each group
    rows_each: int
    is_empty: bool


def _note_batches(punica: Any) -> None:
    """Add a :class:`_Batch` to vLLM's metadata of a batch, which is made when the rows' tenants change."""
    update = punica.update_metadata

    def update_metadata(*args: Any, **given: Any) -> None:
        update(*args, **given)
        slots, counts = torch.unique_consecutive(punica.token_lora_indices, return_counts=True)
        rows_each = int(counts[0])
        if bool((counts != rows_each).any()):
            slots, rows_each = punica.token_lora_indices, 1
        punica.batch_of_tenants = _Batch(slots + 1, rows_each, is_empty=bool((slots < 0).all()))

    punica.update_metadata = update_metadata
    punica.batch_of_tenants = _Batch(torch.empty(0), 1, is_empty=True)


class CoreWithSlots(ReplicatedLinearWithLoRA):
    """A core layer with a core for each slot, after a core of zeros: rows without a tenant have the slot -1."""

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        shape = (max_loras + 1, self.input_size, self.output_size)
        self.cores = torch.zeros(shape, dtype=lora_config.lora_dtype, device=self.device)
        self.lora_a_stacked = self.lora_b_stacked = (self.cores.unsqueeze(1),)  # vLLM reads their shapes
        self.batch: _Batch | None = None
        self.cores_of_batch = self.cores[:0]
        self.P: Tensor | None = None

    def set_mapping(self, punica_wrapper: Any) -> None:
        super().set_mapping(punica_wrapper)
        if not hasattr(punica_wrapper, "batch_of_tenants"):
            _note_batches(punica_wrapper)

    def reset_lora(self, index: int) -> None:
        self.cores[index + 1].zero_()
        self.batch = None

    def set_lora(self, index: int, lora_a: Tensor, lora_b: Tensor) -> None:
        core = lora_b @ lora_a if lora_a.numel() else lora_b
        r_out, r_in = core.shape
        if core.shape != self.cores.shape[:0:-1]:
            self.reset_lora(index)
        self.cores[index + 1, :r_in, :r_out] = core.mT
        self.batch = None

    def forward(self, y: Tensor, z: Tensor, P: Any) -> Tensor:
        """Add P times the product to y, in place."""
        batch = self.punica_wrapper.batch_of_tenants
        if batch.is_empty:
            return y
        if self.P is None:  # its rows, exact: vLLM may hold P packed
            self.P = P(torch.eye(self.output_size, dtype=z.dtype, device=z.device))
        return y.flatten(0, -2).addmm_(self.product(z, batch), self.P).view(y.shape)

    def product(self, z: Tensor, batch: _Batch) -> Tensor:
        """Multiply each row by its tenant's core; a small batch like the one before has its cores at hand."""
        if self.batch is batch:
            cores = self.cores_of_batch
        else:
            cores = self.cores.index_select(0, batch.cores)
            if len(cores) <= _LARGEST_KEPT:
                self.batch, self.cores_of_batch = batch, cores
        rows = z.reshape(-1, batch.rows_each, self.input_size)
        return torch.bmm(rows.to(cores.dtype), cores).flatten(0, 1).to(z.dtype)

    @classmethod
    def can_replace_layer(cls, source_layer: Any, **given: Any) -> bool:
        building = get_current_vllm_config_or_none()
        if building is None or not building.model_config.enforce_eager or not current_platform.is_cpu():
            return False
        is_core = getattr(source_layer, "prefix", "").endswith(f".{CORE}")
        return is_core and super().can_replace_layer(source_layer=source_layer, **given)


# -------------------------------------------------------------------------------------------- tenants from memory


class TenantWorker:
    """Methods that vLLM's workers get by ``worker_extension_cls``: a tenant enters from memory, without a folder.

    ``LLM(..., worker_extension_cls="frozencore_vllm.TenantWorker")``, then
    ``llm.collective_rpc("put_tenant", args=(1, weights))`` and ``LoRARequest(name, 1, "memory")`` as for any adapter.
    """

    def put_tenant(self: Any, number: int, weights: bytes) -> None:
        """Load a tenant under a number, in place of the one that has it, and into a slot.

        vLLM's prefix cache stays as it is: call ``llm.reset_prefix_cache()`` after a tenant was replaced. A tenant that
        vLLM evicts (``max_cpu_loras``) must be put again.

        Args:
            number: ``lora_int_id`` of the requests, from 1.
            weights: What ``frozencore.tenant_weights`` returns: safetensors, s·R of each layer.

        Raises:
            ValueError: The cores belong to another basis than the model's.
        """
        loras = self.model_runner.lora_manager
        manager = loras._adapter_manager
        _require_basis("The tenant", _basis_id_in(weights), getattr(self.model_config.hf_config, ENTRY))
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        renamed = mapper and mapper.get_rename_mapper()
        layers = {}
        for key, core in load(weights).items():
            name, is_a = utils.parse_fine_tuned_lora_name(key, renamed)
            if not is_a:
                rank = len(core)  # its columns are those of the largest core, as in a folder
                B = core[:, :rank].to(loras.lora_config.lora_dtype)
                A = torch.eye(0 if hasattr(manager.modules[name], "cores") else rank, dtype=B.dtype)
                layers[name] = LoRALayerWeights(name, rank, rank, A, B)
        tenant = LoRAModel(number, max(layer.rank for layer in layers.values()), layers)
        manager.remove_adapter(number)
        if len(manager) + 1 > manager.capacity:
            manager.remove_oldest_adapter()
        manager.add_adapter(tenant)
        try:
            manager.activate_adapter(number)
        except Exception:
            manager.remove_adapter(number)  # which vLLM counts as active before its layers have it
            raise


def _basis_id_in(weights: bytes) -> str | None:
    """The basis id in the header of a tenant's weights."""
    start = 8  # bytes of the header's length
    header = json.loads(weights[start : start + int.from_bytes(weights[:start], "little")])
    basis_id: str | None = header.get("__metadata__", {}).get(ENTRY)
    return basis_id


def _require_basis(tenant: str, basis_id: str | None, entry: Mapping[str, Any]) -> None:
    if basis_id != entry["basis_id"]:
        raise ValueError(
            f"{tenant} has a core on the basis {basis_id}, but this model has {entry['basis_id']}. A core works on one "
            "basis only: export the basis model of its basis."
        )
