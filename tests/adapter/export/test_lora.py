"""The LoRA export: stock PEFT, in a process that never imports us, computes what our adapter computed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model, inject_adapter_in_model, save_as_lora
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from frozencore import FrozenCoreConfig, export_lora, export_merged
from tiny import BATCHES, adapted, logits, same_tensors, tiny_gpt2, tiny_llama, tiny_qwen2, train_at_random

STOCK = """
import json, sys, warnings
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

cases = json.load(open(sys.argv[1]))
batch = torch.load(sys.argv[2])
results = {}
for name, (base, adapter, dtype) in cases.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
        if adapter:
            model = PeftModel.from_pretrained(model, adapter)
        model.eval()
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    with torch.no_grad():
        out = {"logits": model(**inputs).logits.float()}
        if adapter:
            out["merged"] = model.merge_and_unload()(**inputs).logits.float()
    out["complaints"] = [str(w.message) for w in caught if "keys" in str(w.message) or "fan_in" in str(w.message)]
    results[name] = out
assert "frozencore" not in sys.modules
torch.save(results, sys.argv[3])
"""


@dataclass
class Case:
    """Our logits, and what the stock process made of the export."""

    ours: Tensor
    directory: Path
    stock: Tensor | None = None
    stock_merged: Tensor | None = None
    complaints: tuple[str, ...] = ()


MODELS = {
    "qkvo": lambda: adapted("fcca", trained=True),
    "q and v": lambda: adapted("fcca", trained=True, target_modules=["q_proj", "v_proj"]),
    "q": lambda: adapted("random", trained=True, target_modules=["q_proj"]),
    "all-linear": lambda: adapted("random", trained=True, target_modules="all-linear"),
    "ragged": lambda: adapted("random", trained=True, r=3, rank_pattern={"q_proj": 2, "v_proj": 5}),
    "alpha": lambda: adapted("fcca", trained=True, r=4, alpha=7.0, alpha_pattern={"o_proj": 2.0}),
    "ragged alpha": lambda: adapted(
        "random", trained=True, r=3, rank_pattern={"k_proj": 6}, alpha=5.0, alpha_pattern={"v_proj": 1.5}
    ),
    "one layer": lambda: adapted("random", trained=True, layers_to_transform=[1]),
    "wider than layers": lambda: adapted("random", trained=True, r=20, alpha=3.0),
    "llama": lambda: adapted("lora_xs", model=tiny_llama(), trained=True),
    "gpt2": lambda: adapted("random", model=tiny_gpt2(), trained=True, target_modules="all-linear"),
    "gpt2 c_attn": lambda: adapted("random", model=tiny_gpt2(), trained=True, target_modules=["c_attn"]),
    "gpt2 attn.c_proj": lambda: adapted("random", model=tiny_gpt2(), trained=True, target_modules=["attn.c_proj"]),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Every model exported by us, loaded by one stock process."""
    folder = tmp_path_factory.mktemp("served")
    cases, jobs = {}, {}
    for name, make in MODELS.items():
        model = make()
        _save_base(model, folder / name / "base")
        cases[name] = Case(logits(model), folder / name / "lora")
        export_lora(model, folder / name / "lora")
        jobs[name] = [str(folder / name / "base"), str(folder / name / "lora"), "float32"]

    half = adapted("random", dtype=torch.bfloat16, trained=True)
    _save_base(half, folder / "half" / "base")
    half.save_pretrained(folder / "half" / "ours")
    export_lora(half, folder / "half" / "lora")
    wide = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "half" / "base", dtype=torch.float32), folder / "half" / "ours"
    ).eval()
    cases["bf16 base"] = Case(logits(half).float(), folder / "half" / "lora")
    cases["bf16 base, widened"] = Case(logits(wide), folder / "half" / "lora")
    for name, dtype in (("bf16 base", "bfloat16"), ("bf16 base, widened", "float32")):
        jobs[name] = [str(folder / "half" / "base"), str(folder / "half" / "lora"), dtype]

    saved = MODELS["all-linear"]()
    saved.save_pretrained(folder / "saved")
    _save_base(saved, folder / "saved-base")
    export_merged(folder / "saved", folder / "merged", base=folder / "saved-base")
    cases["merged"] = Case(logits(saved), folder / "merged")
    jobs["merged"] = [str(folder / "merged"), None, "float32"]

    (folder / "jobs.json").write_text(json.dumps(jobs))
    torch.save(BATCHES[0], folder / "batch.pt")
    command = [sys.executable, "-c", STOCK, *(str(folder / name) for name in ("jobs.json", "batch.pt", "out.pt"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, found in torch.load(folder / "out.pt").items():
        cases[name].stock, cases[name].stock_merged = found["logits"], found.get("merged")
        cases[name].complaints = tuple(found["complaints"])
    return cases


def _save_base(model: PeftModel, folder: Path) -> None:
    """The model under the adapter, as it was before."""
    base = model.get_base_model()
    plain = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in base.state_dict().items()
        if "frozencore_" not in name
    }
    type(base)(base.config).to(base.dtype).save_pretrained(folder, state_dict=plain)


@pytest.mark.parametrize("name", [*MODELS, "bf16 base, widened", "merged"])
def test_stock_peft_gives_the_same_logits(served: dict[str, Case], name: str) -> None:
    case = served[name]
    torch.testing.assert_close(case.stock, case.ours, atol=1e-5, rtol=1e-5)
    assert case.complaints == ()
    if case.stock_merged is None:
        return
    torch.testing.assert_close(case.stock_merged, case.ours, atol=2e-5, rtol=1e-4)


PACKED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("gpt2")])
def test_an_export_has_the_form_that_every_engine_reads_alike(served: dict[str, Case], name: str) -> None:
    """One rank and scale, factors alone and in pairs, packed layers whole, every layer listed: the sources of vLLM
    (``PEFTHelper``), SGLang (``lora_config.py``, ``lora.py``) and llama.cpp (``convert_lora_to_gguf.py``) ask
    for it.
    """
    config = json.loads((served[name].directory / "adapter_config.json").read_text())
    tensors = load_file(served[name].directory / "adapter_model.safetensors")
    assert config["lora_alpha"] == config["r"]
    assert (config["rank_pattern"], config["alpha_pattern"], config["bias"]) == ({}, {}, "none")
    assert not any(config[field] for field in ("use_rslora", "use_dora", "modules_to_save", "fan_in_fan_out"))
    layers = {key.rpartition(".lora_")[0] for key in tensors}
    assert tensors.keys() == {f"{layer}.lora_{side}.weight" for layer in layers for side in "AB"}
    assert all(key.startswith("base_model.model.") for key in tensors)
    assert {tensors[f"{layer}.lora_A.weight"].shape[0] for layer in layers} == {config["r"]}
    assert all(tensor.dtype == torch.float32 and bool(tensor.isfinite().all()) for tensor in tensors.values())
    for layer in layers:
        above, _, last = layer.rpartition(".")
        packed = next((pack for pack in PACKED if last in pack), (last,))
        assert {f"{above}.{each}" for each in packed} <= layers
        assert any(layer == f"base_model.model.{end}" or layer.endswith(f".{end}") for end in config["target_modules"])


def test_the_export_changes_the_logits_and_on_a_bf16_base_is_as_near_as_bf16_rounds(served: dict[str, Case]) -> None:
    assert (served["q"].ours - logits(tiny_qwen2())).abs().max() > 0.1
    case = served["bf16 base"]
    assert (case.stock - case.ours).abs().max() < 0.03 * case.ours.abs().max()


def test_ragged_ranks_are_padded_to_the_largest_and_alpha_is_the_rank(served: dict[str, Case]) -> None:
    config = json.loads((served["ragged"].directory / "adapter_config.json").read_text())
    tensors = load_file(served["ragged"].directory / "adapter_model.safetensors")
    assert (config["r"], config["lora_alpha"]) == (5, 5)
    assert {tensor.shape[0] for key, tensor in tensors.items() if "lora_A" in key} == {5}
    assert not tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"][:, 2:].any()


def test_layers_that_engines_pack_are_there_and_zero(served: dict[str, Case]) -> None:
    tensors = load_file(served["q and v"].directory / "adapter_model.safetensors")
    k = [tensor for key, tensor in tensors.items() if "k_proj" in key]
    assert len(k) == 4
    assert not any(tensor.any() for tensor in k)
    assert not any("o_proj" in key or "mlp" in key for key in tensors)


@pytest.mark.parametrize("name", ["ragged alpha", "q and v", "q"])
def test_a_saved_folder_exports_to_the_same_tensors_as_the_model(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "saved")
    tiny_qwen2().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()  # only the architecture is read
    from_model = export_lora(model, tmp_path / "model")
    bases = {"a module": tiny_qwen2(), "a folder": tmp_path / "base"}
    if name != "q":  # the shapes of k and v are in the base alone
        bases |= {"none": None}
    expected = load_file(tmp_path / "model" / "adapter_model.safetensors")
    for kind, base in bases.items():
        found = export_lora(tmp_path / "saved", tmp_path / kind, base=base)
        assert (found.rank, set(found.layers)) == (from_model.rank, set(from_model.layers))
        assert set(found.zero_layers) == set(from_model.zero_layers)
        assert same_tensors(load_file(tmp_path / kind / "adapter_model.safetensors"), expected)


def test_conv1d_and_linear_targets_in_one_adapter_work(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned, self.straight = Conv1D(6, 4), nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.straight(self.turned(x).tanh())

    base = Both()
    x = torch.randn(3, 4)
    model = get_peft_model(
        base, FrozenCoreConfig(r=2, constructor="random", target_modules=["turned", "straight"])
    ).eval()
    train_at_random(model)
    ours = model(x)
    export_lora(model, tmp_path / "lora")
    stock = PeftModel.from_pretrained(model.unload(), tmp_path / "lora").eval()
    torch.testing.assert_close(stock(x), ours, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(stock.merge_and_unload()(x), ours, atol=1e-5, rtol=1e-5)


def test_one_of_several_adapters_is_exported_by_name(tmp_path: Path) -> None:
    model = adapted("random", trained=True)
    model.add_adapter("second", FrozenCoreConfig(r=2, constructor="random", seed=1))
    train_at_random(model, "second", seed=1)
    model.set_adapter("second")
    assert export_lora(model, tmp_path / "active").rank == 2
    assert export_lora(model, tmp_path / "named", adapter_name="default").rank == 3
    injected = inject_adapter_in_model(FrozenCoreConfig(r=2, constructor="random"), tiny_qwen2())
    assert len(export_lora(injected.eval(), tmp_path / "injected").layers) == 8


def test_pefts_own_conversion_gives_the_same_logits(tmp_path: Path) -> None:
    for name in ("qkvo", "gpt2"):
        model = MODELS[name]()
        ours = logits(model)
        save_as_lora(tmp_path / name, model, rank=3)
        stock = PeftModel.from_pretrained(model.unload(), tmp_path / name).eval()
        torch.testing.assert_close(logits(stock), ours, atol=1e-4, rtol=1e-4)
