"""Basis models and tenants: stock PEFT's LoRA on the cores of a basis model computes what our adapter computes."""

from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from fake_vllm import frozencore_vllm
from families import make
from fixtures import ROOT, few
from frozencore import export_basis_model, export_tenant, save_basis, tenant_weights
from frozencore.adapter.folders import read_adapter
from frozencore.errors import ArtifactError
from frozencore_basis_model import LinearOnBasis
from tiny import BATCHES, adapted, logits, tiny_gpt2, tiny_llama, tiny_qwen2

FAMILIES = {
    "llama": (tiny_llama, {}),
    "qwen2, tied": (tiny_qwen2, {"target_modules": "all-linear"}),
    **{name: (partial(make, name), {"target_modules": "all-linear"}) for name in ("qwen3", "gemma2", "phi", "phi3")},
    "mistral": (partial(make, "mistral"), {"target_modules": ["q_proj", "down_proj"]}),
    "falcon_h1": (partial(make, "falcon_h1"), {}),  # the model fills a tensor of its layers that no file has
    "gpt2": (tiny_gpt2, {"target_modules": "all-linear"}),
    "gpt2 c_attn": (tiny_gpt2, {"target_modules": ["c_attn"], "alpha": 5.0}),
    "scale": (tiny_qwen2, {"alpha": 7.0, "alpha_pattern": {"o_proj": 2.0}}),
    "ragged, some layers left out": (tiny_qwen2, {"rank_pattern": {"q_proj": 2, "v_proj": 5, "k_proj": 0}}),
    "one layer": (tiny_qwen2, {"layers_to_transform": [1]}),
    "wider than its layers": (tiny_llama, {"r": 20, "alpha": 3.0}),
}


@dataclass
class Case:
    """The folders of a base model, an adapter on it, and what was made of them."""

    base: Path
    adapter: Path
    basis_model: Path
    tenant: Path


def exported(folder: Path, base: nn.Module, dtype: torch.dtype = torch.float32, **options: object) -> Case:
    case = Case(folder / "base", folder / "adapter", folder / "basis-model", folder / "tenant")
    base.to(dtype).save_pretrained(case.base)
    model = adapted("random", model=base, dtype=dtype, trained=True, **options)
    model.save_pretrained(case.adapter)
    export_basis_model(case.adapter, case.basis_model, base=case.base)
    export_tenant(case.adapter, case.tenant, basis_model=case.basis_model)
    return case


def native(case: Case, dtype: torch.dtype) -> Tensor:
    base = AutoModelForCausalLM.from_pretrained(case.base, dtype=dtype)
    return logits(PeftModel.from_pretrained(base, case.adapter).eval())


def served(case: Case, dtype: torch.dtype) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(case.basis_model, dtype=dtype)
    return logits(PeftModel.from_pretrained(model, case.tenant).eval())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return exported(tmp_path_factory.mktemp("plain"), tiny_qwen2(), alpha=7.0)


@pytest.mark.parametrize("family", few(FAMILIES, "llama", "gpt2", "phi", "gemma2", "falcon_h1", "scale"))
def test_a_tenant_on_its_basis_model_gives_the_logits_of_the_native_adapter(family: str, tmp_path: Path) -> None:
    base, options = FAMILIES[family]
    case = exported(tmp_path, base(), **options)
    true = native(case, torch.float64)
    torch.testing.assert_close(served(case, torch.float64), true, rtol=1e-6, atol=1e-6)  # s·R is stored in float32
    ours, theirs = native(case, torch.float32), served(case, torch.float32)
    rounding = (ours.double() - true).abs().max()
    assert (theirs.double() - true).abs().max() < 4 * rounding + 1e-6
    base = logits(AutoModelForCausalLM.from_pretrained(case.base, dtype=torch.float32).eval())
    assert (ours - base).abs().max() > 1e-2
    by_itself = AutoModelForCausalLM.from_pretrained(case.basis_model, dtype=torch.float32).eval()
    assert torch.equal(logits(by_itself), base)


def test_a_16_bit_base_serves_a_tenant_as_near_to_the_truth_as_the_native_adapter(tmp_path: Path) -> None:
    case = exported(tmp_path, tiny_qwen2(), dtype=torch.bfloat16, alpha=7.0)
    true, ours, theirs = native(case, torch.float64), native(case, torch.bfloat16), served(case, torch.bfloat16)
    assert theirs.dtype == torch.bfloat16
    torch.testing.assert_close(served(case, torch.float64), true, rtol=1e-6, atol=1e-6)
    assert (theirs.double() - true).norm() < 1.5 * (ours.double() - true).norm()


def test_the_folder_holds_the_base_weights_and_the_basis_bit_for_bit_and_no_tied_head_twice(plain: Case) -> None:
    stored, base = load_file(plain.basis_model / "model.safetensors"), load_file(plain.base / "model.safetensors")
    factors = load_file(plain.adapter / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.v_proj"
    adapter = f"base_model.model.{name}.frozencore_"
    assert torch.equal(stored[f"{name}.base.weight"], base[f"{name}.weight"])
    assert torch.equal(stored[f"{name}.base.bias"], base[f"{name}.bias"])
    assert torch.equal(stored[f"{name}.P.weight"], factors[f"{adapter}P"])
    assert torch.equal(stored[f"{name}.Q.weight"], factors[f"{adapter}Q"].mT)
    assert not stored[f"{name}.core.weight"].any()
    assert len(stored) == len(base) + 3 * 8
    assert "lm_head.weight" not in stored


def test_a_tenant_holds_an_identity_and_the_scaled_core_and_nothing_else(plain: Case) -> None:
    tenant = load_file(plain.tenant / "adapter_model.safetensors")
    saved = read_adapter(plain.adapter)
    cores = saved.core.by_layer(saved.find_basis().ranks)
    assert len(tenant) == 2 * 8
    for key in [key for key in tenant if "lora_A" in key]:
        layer = key.removesuffix(".core.lora_A.weight")
        assert torch.equal(tenant[key], torch.eye(3))
        R = cores[layer.removeprefix("base_model.model.")].double()
        assert torch.equal(tenant[f"{layer}.core.lora_B.weight"], (7 / 3 * R).float())
    config = json.loads((plain.tenant / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 3, ["core"])


def test_a_basis_in_a_folder_of_its_own_and_adapters_on_it_by_name_make_the_same(tmp_path: Path) -> None:
    tiny_qwen2().save_pretrained(tmp_path / "base")
    model = adapted("fcca", trained=True, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "whole")
    save_basis(model, tmp_path / "basis")
    model.save_pretrained(tmp_path / "named")
    made = export_basis_model(tmp_path / "basis", tmp_path / "one", base=tmp_path / "base")
    for source in ("whole", "named"):
        assert export_basis_model(tmp_path / source, tmp_path / source / "made", base=tmp_path / "base").basis_id == (
            made.basis_id
        )
        export_tenant(tmp_path / source, tmp_path / f"tenant-{source}", basis_model=tmp_path / "one")
    export_tenant(model, tmp_path / "tenant-memory", basis_model=tmp_path / "one")
    for source in ("named", "memory"):
        one, other = (
            safe_open(tmp_path / f"tenant-{kind}" / "adapter_model.safetensors", "pt") for kind in ("whole", source)
        )
        assert one.metadata() == other.metadata()  # which stands in the file in any order
        assert one.keys() == other.keys()
        assert all(torch.equal(one.get_tensor(name), other.get_tensor(name)) for name in one.keys())  # noqa: SIM118


def test_a_tenants_weights_in_memory_are_the_cores_of_its_folder_and_name_its_basis(
    plain: Case, tmp_path: Path
) -> None:
    entry = json.loads((plain.basis_model / "config.json").read_text())["frozencore_basis"]
    base = AutoModelForCausalLM.from_pretrained(plain.base)
    weights = tenant_weights(PeftModel.from_pretrained(base, plain.adapter))
    (tmp_path / "weights").write_bytes(weights)
    written, sent = (
        safe_open(file, "pt") for file in (plain.tenant / "adapter_model.safetensors", tmp_path / "weights")
    )
    assert written.metadata() == sent.metadata()
    assert sent.keys() == [name for name in written.keys() if ".lora_A." not in name]  # noqa: SIM118
    assert all(torch.equal(written.get_tensor(name), sent.get_tensor(name)) for name in sent.keys())  # noqa: SIM118
    assert frozencore_vllm._basis_id_in(weights) == entry["basis_id"]


STOCK = """
import json, sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

out, batch = {}, torch.load(sys.argv[1])
for name, (folder, tenant) in json.loads(sys.argv[2]).items():
    if name == "registered":
        import frozencore_basis_model
        frozencore_basis_model.register()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=name == "code")
    with torch.no_grad():
        out[name] = PeftModel.from_pretrained(model, tenant).eval()(**batch).logits
assert "frozencore" not in sys.modules
torch.save(out, sys.argv[3])
"""


@pytest.mark.slow
def test_a_process_without_frozencore_loads_it_by_its_code_or_by_the_registered_architecture(
    plain: Case, tmp_path: Path
) -> None:
    export_basis_model(plain.adapter, tmp_path / "code", base=plain.base, with_code=True)
    batch = {key: BATCHES[0][key] for key in ("input_ids", "attention_mask")}
    torch.save(batch, tmp_path / "batch.pt")
    folders = {"code": tmp_path / "code", "registered": plain.basis_model}
    jobs = json.dumps({name: [str(folder), str(plain.tenant)] for name, folder in folders.items()})
    command = [sys.executable, "-c", STOCK, str(tmp_path / "batch.pt"), jobs, str(tmp_path / "out.pt")]
    cache = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=cache)
    assert done.returncode == 0, done.stderr[-2000:]
    for found in torch.load(tmp_path / "out.pt").values():
        assert torch.equal(found, served(plain, torch.float32))


def test_a_configuration_travels_to_another_process_and_the_base_class_loads_without_its_head(plain: Case) -> None:
    config = AutoConfig.from_pretrained(plain.basis_model)
    for again in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert type(again) is type(config)
        assert again.to_dict() == config.to_dict()
    assert (config.model_type, config.architectures) == ("frozencore_basis_model", ["TransformersForCausalLM"])
    below = AutoModel.from_pretrained(plain.basis_model)
    assert isinstance(below.layers[0].self_attn.q_proj, LinearOnBasis)
    assert not isinstance(below.layers[0].mlp.up_proj, LinearOnBasis)


def test_where_a_layer_is_split_between_devices_so_is_what_stands_beside_it(plain: Case) -> None:
    plan = AutoModel.from_pretrained(plain.basis_model).tp_plan
    first = {}  # as vLLM reads it: the first pattern that a name begins with
    for name in ("q_proj.base", "q_proj.Q", "q_proj.core", "q_proj.P", "o_proj.base", "o_proj.Q", "o_proj.P"):
        full = f"layers.1.self_attn.{name}"
        first[name] = next(style for pattern, style in plan.items() if re.match(pattern.replace("*", r"\d+"), full))
    assert first == {
        "q_proj.base": "colwise", "q_proj.Q": "replicate", "q_proj.core": "replicate", "q_proj.P": "colwise",
        "o_proj.base": "rowwise", "o_proj.Q": "rowwise", "o_proj.P": "replicate",
    }  # fmt: skip


def test_a_model_that_several_processes_share_computes_the_same_and_is_not_merged(
    plain: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.from_pretrained(plain.basis_model)
    alone = AutoModelForCausalLM.from_pretrained(plain.basis_model)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    shared = AutoModelForCausalLM.from_config(config).eval()
    monkeypatch.undo()
    shared.load_state_dict(alone.state_dict())
    assert torch.equal(logits(shared), logits(alone.eval()))
    for model, merged in ((alone, 1), (shared, 0)):  # what vLLM looks for: linear layers that read the very input
        layer = model.model.layers[0].self_attn.q_proj
        graph = torch.fx.symbolic_trace(layer).graph
        read = [node.target for node in graph.nodes if node.op == "call_module" and node.args[0].op == "placeholder"]
        assert len(read) == 1 + merged


def test_a_tenant_of_another_basis_is_refused_in_one_line(plain: Case, tmp_path: Path) -> None:
    adapted("random", trained=True, seed=5).save_pretrained(tmp_path / "other")
    with pytest.raises(ArtifactError, match="A core works on one basis only"):
        export_tenant(tmp_path / "other", tmp_path / "tenant", basis_model=plain.basis_model)
    adapted("random", model=tiny_qwen2(seed=1), trained=True, alpha=7.0).save_pretrained(tmp_path / "other base")
    with pytest.raises(ArtifactError, match="has a core on the basis"):  # its P and Q are the same
        export_tenant(tmp_path / "other base", tmp_path / "tenant", basis_model=plain.basis_model)
    assert not (tmp_path / "tenant").exists()


def test_a_tenant_names_its_basis_model_in_the_words_that_were_given(
    plain: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM loads a tenant on demand if they are those of its own ``--model``."""
    monkeypatch.chdir(plain.basis_model.parent)
    for words in (str(plain.basis_model), plain.basis_model.name, f"./{plain.basis_model.name}/"):
        export_tenant(plain.adapter, tmp_path / "tenant", basis_model=words, overwrite=True)
        config = json.loads((tmp_path / "tenant" / "adapter_config.json").read_text())
        assert (config["peft_type"], config["base_model_name_or_path"]) == ("LORA", words)


def test_vllm_finds_the_architecture_by_an_entry_point() -> None:
    values = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, function = values["entry-points"]["vllm.general_plugins"]["frozencore_basis_model"].split(":")
    assert getattr(importlib.import_module(module), function) is frozencore_vllm.register
