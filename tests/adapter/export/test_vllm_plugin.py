"""vLLM's plug-in: tenants are read from the folder that training wrote. tests/engines asks vLLM itself."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from fake_vllm import MODULES, REGISTRY, Registry, ServingModels, frozencore_vllm
from frozencore import basis_id, export_basis_model, export_tenant, save_basis, tenant_weights
from frozencore.adapter.folders import read_adapter
from tiny import adapted, cores_of, same_tensors, tiny_qwen2, train_at_random

Tenants = frozencore_vllm.Tenants
WEIGHTS = "adapter_model.safetensors"


class Shop(SimpleNamespace):
    """A basis model, and a folder of tenants on its basis."""

    model: Path
    tenants: Path

    def write(self, name: str, seed: int, bits: int = 32) -> Path:
        """Write a tenant with a core of a seed, in place of the one that has its name."""
        train_at_random(self.native, seed=seed)
        self.native.save_pretrained(str(self.whole))
        saved, folder = read_adapter(self.whole), self.tenants / name / "adapter"
        saved.write(folder, saved.core.in_bits(bits, saved.ranks), overwrite=True)
        return folder


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    folder = tmp_path_factory.mktemp("shop")
    tiny_qwen2().save_pretrained(folder / "base")
    native = adapted("random", trained=True, alpha=7.0, rank_pattern={"q_proj": 2}, alpha_pattern={"o_proj": 2.0})
    save_basis(native, folder / "basis")
    export_basis_model(folder / "basis", folder / "model", base=folder / "base")
    return Shop(native=native, whole=folder / "whole", model=folder / "model", tenants=folder / "tenants")


@pytest.fixture
def tenants(shop: Shop, tmp_path: Path) -> Tenants:
    return Tenants(shop.tenants, tmp_path / "cache")


@pytest.mark.parametrize("bits", [32, 8, 4, 2])
def test_a_tenant_of_any_bits_is_the_lora_that_export_writes(
    bits: int, shop: Shop, tenants: Tenants, tmp_path: Path
) -> None:
    adapter = shop.write("anna", seed=1, bits=bits)
    export_tenant(adapter, tmp_path / "exported", basis_model=shop.model)
    name, version = tenants.find(str(shop.model), "anna")
    assert same_tensors(load_file(version.folder / WEIGHTS), load_file(tmp_path / "exported" / WEIGHTS))
    configs = [
        json.loads((place / "adapter_config.json").read_text()) for place in (version.folder, tmp_path / "exported")
    ]
    read = ("peft_type", "r", "lora_alpha", "target_modules", "bias")
    assert [configs[0][key] for key in read] == [configs[1][key] for key in read]
    assert name.startswith("anna@")


def test_a_run_with_its_own_basis_and_an_adapter_without_a_run_are_tenants(shop: Shop, tenants: Tenants) -> None:
    shutil.copytree(shop.write("dora", seed=2), shop.tenants / "plain")
    assert tenants.find(str(shop.model), "plain")[1].folder == tenants.find(str(shop.model), "dora")[1].folder


def test_a_replaced_tenant_has_another_name_and_folder_and_the_earlier_version_ends(
    shop: Shop, tenants: Tenants
) -> None:
    shop.write("ben", seed=1)
    name, version = tenants.find(str(shop.model), "ben")
    assert version.is_current()
    assert tenants.find(str(shop.model), "ben") == (name, version)
    shop.write("ben", seed=2)
    assert not version.is_current()
    new_name, new = tenants.find(str(shop.model), "ben")
    assert new_name != name
    assert new.folder != version.folder
    shutil.rmtree(shop.tenants / "ben")
    assert not new.is_current()
    assert (new.folder / WEIGHTS).is_file()  # for what is running
    assert tenants.find(str(shop.model), "ben") is None


class Slot(frozencore_vllm.CoreWithSlots):
    def __init__(self, rank: int) -> None:
        self.input_size = self.output_size = rank
        self.device = "cpu"
        self.create_lora_weights(2, SimpleNamespace(lora_dtype=torch.float32))


class Manager:
    """vLLM's ``LoRAModelManager`` (0.32), as far as a tenant from memory meets it."""

    capacity = 2

    def __init__(self, ranks: dict[str, int]) -> None:
        self.modules = {f"{name}.core": Slot(rank) for name, rank in ranks.items()}
        self.model, self.known, self.active = SimpleNamespace(), dict[int, Any](), list[int]()

    def __len__(self) -> int:
        return len(self.known)

    def remove_adapter(self, number: int) -> None:
        self.known.pop(number, None)
        self.active = [other for other in self.active if other != number]

    def add_adapter(self, tenant: Any) -> None:
        self.known[tenant.number] = tenant

    def activate_adapter(self, number: int) -> None:
        self.active.append(number)  # before any layer has it, as in vLLM
        for name, module in self.modules.items():
            layer = self.known[number].layers[name]
            module.set_lora(0, layer.lora_a, layer.lora_b)


def test_a_tenant_from_memory_has_the_ranks_of_its_layers_or_is_not_there(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layer_of(key: str, _: object) -> tuple[str, bool]:
        return key.removeprefix("base_model.model.").rpartition(".lora_")[0], ".lora_A." in key

    monkeypatch.setattr(frozencore_vllm.utils, "parse_fine_tuned_lora_name", layer_of, raising=False)
    monkeypatch.setattr(frozencore_vllm, "LoRALayerWeights", lambda _, rank, alpha, A, B: SimpleNamespace(
        rank=rank, lora_a=A, lora_b=B))  # fmt: skip
    monkeypatch.setattr(frozencore_vllm, "LoRAModel", lambda number, _, layers: SimpleNamespace(
        number=number, layers=layers))  # fmt: skip
    entry = {"basis_id": basis_id(shop.native)}
    manager = Manager({layer.name: len(layer.core("default")) for layer in cores_of(shop.native)})
    loras = SimpleNamespace(_adapter_manager=manager, lora_config=SimpleNamespace(lora_dtype=torch.float32))
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(lora_manager=loras),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(**{frozencore_vllm.ENTRY: entry})),
    )
    frozencore_vllm.TenantWorker.put_tenant(worker, 1, tenant_weights(shop.native))
    assert len({len(layer.core("default")) for layer in cores_of(shop.native)}) > 1
    for layer in cores_of(shop.native):
        R = layer.frozencore_scale["default"] * layer.core("default").detach()
        torch.testing.assert_close(manager.modules[f"{layer.name}.core"].cores[1], R.T)
    manager.modules["another.core"] = Slot(2)  # a layer without a core fails when the tenant is activated
    with pytest.raises(KeyError):
        frozencore_vllm.TenantWorker.put_tenant(worker, 1, tenant_weights(shop.native))
    assert (manager.known, manager.active) == ({}, [])


@pytest.mark.parametrize("name", ["nobody", "../tenants/carol", "carol/adapter", ".", "", "carol\n", "basis"])
def test_other_names_are_unknown(name: str, shop: Shop, tenants: Tenants) -> None:
    shop.write("carol", seed=1)
    assert tenants.find(str(shop.model), name) is None
    assert tenants.find(str(shop.model), "carol") is not None


def damage(folder: Path) -> None:
    file = folder / WEIGHTS
    file.write_bytes(file.read_bytes()[:-10])


def with_nan(folder: Path) -> None:
    save_file({key: torch.full_like(X, torch.nan) for key, X in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)


def as_codes(folder: Path) -> None:
    save_file({key: X.to(torch.uint8) for key, X in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)


def change_basis(folder: Path) -> None:
    shutil.rmtree(folder)
    adapted("random", trained=True, seed=9).save_pretrained(str(folder))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (damage, "The adapter of 'eve' is damaged"),
        (with_nan, "finite values, but that of 'eve' is not"),
        (as_codes, "finite values, but that of 'eve' is not"),
        (change_basis, "'eve' has a core on the basis .*, but this model has .*A core works on one basis only"),
    ],
)
def test_a_damaged_tenant_and_one_on_another_basis_are_refused_in_one_line(
    change: Any, rule: str, shop: Shop, tenants: Tenants
) -> None:
    change(shop.write("eve", seed=1))
    with pytest.raises(ValueError, match=rule) as refused:
        tenants.find(str(shop.model), "eve")
    assert "\n" not in str(refused.value)


def test_the_cache_drops_the_tenants_that_nobody_asked_for_of_late(
    shop: Shop, tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozencore_vllm, "MOST_CACHED", 2)
    for name in ("a", "b", "c"):
        shop.write(name, seed=ord(name))
    versions = [tenants.find(str(shop.model), name)[1] for name in ("a", "b", "c")]
    assert all(one.is_current() for one in versions)  # asked within the hour
    for age_s, version in zip((9000, 8000, 10), versions, strict=True):
        os.utime(version.folder, (time.time() - age_s,) * 2)
    shop.write("d", seed=4)
    tenants.find(str(shop.model), "d")
    assert [one.is_current() for one in versions] == [False, False, True]
    again = tenants.find(str(shop.model), "a")[1]
    assert again.is_current()
    assert not list(tenants.cache.glob(".*"))


def test_a_full_disk_leaves_nothing_of_a_tenant_in_the_cache(
    shop: Shop, tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.write("ida", seed=1)
    with monkeypatch.context() as patched:
        patched.setattr(frozencore_vllm, "save", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            tenants.find(str(shop.model), "ida")
    assert not list(tenants.cache.iterdir())
    assert tenants.find(str(shop.model), "ida")[1].is_current()


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """vLLM as it is before the plug-in is registered."""
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(MODULES["vllm.lora.utils"], "_all_lora_classes", ())
    monkeypatch.setattr(ServingModels, "__init__", ServingModels.__init__)
    monkeypatch.setattr(REGISTRY, "resolvers", {})
    return REGISTRY


def test_a_request_gets_the_tenant_as_it_is_now_and_an_error_of_its_own(
    shop: Shop, vllm: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROZENCORE_TENANTS", str(shop.tenants))
    monkeypatch.setenv("FROZENCORE_CACHE", str(tmp_path / "cache"))
    for _ in range(2):  # vLLM loads its plug-ins more than once
        frozencore_vllm.register()
    assert len(sys.modules["vllm.lora.utils"]._all_lora_classes) == len(vllm.resolvers) == 1
    server = ServingModels(str(shop.model), vllm)

    def ask(name: str) -> Any:
        return asyncio.run(server.resolve_lora(name))

    shop.write("fay", seed=1)
    first = ask("fay")
    assert ask("fay") is first
    shop.write("fay", seed=2)
    second = ask("fay")
    assert len({first.lora_name, second.lora_name}) == len({first.lora_int_id, second.lora_int_id}) == 2
    assert first.lora_path != second.lora_path
    assert ask("nobody") == "404"
    damage(shop.tenants / "fay/adapter")
    with pytest.raises(ValueError, match="The adapter of 'fay' is damaged"):
        ask("fay")
    shutil.rmtree(shop.tenants / "fay")
    assert ask("fay") == "404"
    server.lora_requests["lora"] = SimpleNamespace(lora_name="lora")
    assert ask("lora").lora_name == "lora"  # an adapter of vLLM's own ways


def test_a_server_without_slots_in_the_cores_does_not_start(
    shop: Shop, vllm: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM takes every adapter then, and the base model answers (vllm-project/vllm#55193)."""
    monkeypatch.setenv("FROZENCORE_TENANTS", str(shop.tenants))
    monkeypatch.setenv("FROZENCORE_CACHE", str(tmp_path / "cache"))
    frozencore_vllm.register()
    for targets in (["q_proj", "v_proj"], []):
        with pytest.raises(ValueError, match="names (q_proj, v_proj|none). Give --lora-target-modules core"):
            ServingModels(str(shop.model), vllm, targets)
    for targets in (None, ["core"], ["model.layers.0.self_attn.q_proj.core"]):
        ServingModels(str(shop.model), vllm, targets)
    tiny_qwen2().save_pretrained(tmp_path / "plain")
    ServingModels(str(tmp_path / "plain"), vllm, ["q_proj"])


def test_the_cache_is_the_users_own(monkeypatch: pytest.MonkeyPatch, shop: Shop, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    own = Tenants(shop.tenants, frozencore_vllm.own_cache())
    shop.write("gus", seed=1)
    own.find(str(shop.model), "gus")
    assert own.cache.is_relative_to(tmp_path)
    assert own.cache.stat().st_mode & 0o077 == 0


def test_nothing_of_vllm_changes_when_a_basis_model_is_opened(shop: Shop, vllm: Registry) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(shop.model)
    assert sys.modules["vllm.lora.utils"]._all_lora_classes == ()
    assert not vllm.resolvers
