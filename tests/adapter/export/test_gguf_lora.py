"""The GGUF LoRA added, tensor by tensor, to the base model's GGUF file is the native adapter on that file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import Tensor

from adapted import train_at_random
from frozencore import FrozenCoreConfig, export_gguf_lora
from frozencore.errors import ArtifactError, ConfigError, ModelError
from frozencore.tune.run.models import load_model
from places import SHARED
from tiny import tiny_gpt2, tiny_qwen2

pytest.importorskip("gguf")
import gguf

from gguf_files import gguf_name, interleaved, tiny_model, write_gguf

IDS = torch.arange(3, 40)[None]
RAGGED = {"constructor": "random", "r": 3, "alpha": 7.5, "rank_pattern": {"down_proj": 5, "k_proj": 2}}


def tensors_of(file: Path) -> dict[str, Tensor]:
    """Matrices by llama.cpp's names, in float32."""
    return {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(file).tensors
    }


def saved_adapter(base: Path, folder: Path, **options: Any) -> PeftModel:
    """On all linear layers of a GGUF file; its cores are random."""
    model = get_peft_model(load_model(str(base), device="cpu")[0], FrozenCoreConfig(**{**RAGGED, **options})).eval()
    train_at_random(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_base_files_own_tensors_plus_the_lora_are_the_native_adapter(kind: str, tmp_path: Path) -> None:
    base = write_gguf(tiny_model(kind), tmp_path / "tiny.gguf")
    native = saved_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    found = export_gguf_lora(tmp_path / "adapter", tmp_path / "lora.gguf")  # the base is what the adapter names
    assert (found.architecture, found.rank, len(found.layers)) == (kind, 5, 14)
    reader = gguf.GGUFReader(tmp_path / "lora.gguf")
    told = {key: reader.get_field(key).contents() for key in ("general.type", "general.architecture", "adapter.type")}
    assert told == {"general.type": "adapter", "general.architecture": kind, "adapter.type": "lora"}
    scale = reader.get_field("adapter.lora.alpha").contents() / found.rank  # llama.cpp's: alpha over B's rank

    lora, whole = tensors_of(tmp_path / "lora.gguf"), tensors_of(base)
    assert set(lora) == {f"{gguf_name(layer)}.weight.lora_{side}" for layer in found.layers for side in "ab"}
    merged = tiny_model(kind)
    heads = {"q_proj": 4, "k_proj": 2} if kind == "llama" else {}
    with torch.no_grad():
        for layer in found.layers:
            name, last = f"{gguf_name(layer)}.weight", layer.rpartition(".")[2]
            weight = merged.get_submodule(layer).weight
            rows = torch.arange(len(weight))[:, None]
            order = interleaved(rows, heads[last])[:, 0] if last in heads else rows[:, 0]
            assert torch.equal(whole[name], weight[order])
            summed = whole[name] + scale * lora[f"{name}.lora_b"] @ lora[f"{name}.lora_a"]
            weight[order] = summed
            core = native.get_submodule(f"base_model.model.{layer}")
            P, Q, R = core.factors("default")
            update = core.frozencore_scale["default"] * P @ R @ Q.T
            torch.testing.assert_close(weight - tiny_model(kind).get_submodule(layer).weight, update, rtol=0, atol=1e-5)
        torch.testing.assert_close(merged(IDS).logits, native(IDS).logits, rtol=0, atol=2e-4)
        assert (tiny_model(kind)(IDS).logits - merged(IDS).logits).abs().max() > 0.1


def test_a_model_in_memory_halves_and_a_lower_rank(tmp_path: Path) -> None:
    base = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    native = saved_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    export_gguf_lora(native, tmp_path / "whole.gguf")
    whole = tensors_of(tmp_path / "whole.gguf")
    assert {name.split(".")[2] for name in whole} == {"attn_q", "attn_output"}  # no layers of zeros
    for dtype, error in ((torch.float16, 1e-3), (torch.bfloat16, 8e-3)):
        export_gguf_lora(native, tmp_path / "half.gguf", dtype=dtype, overwrite=True)
        for name, values in tensors_of(tmp_path / "half.gguf").items():
            torch.testing.assert_close(values, whole[name].to(dtype).float(), rtol=error, atol=0)
    cut = export_gguf_lora(native, tmp_path / "cut.gguf", rank=1)
    assert cut.rank == 1
    assert cut.error is not None
    assert 0 < cut.error < 1


def test_what_llama_cpp_would_not_serve_is_refused_in_one_line_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_gguf(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    saved_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    out = tmp_path / "lora.gguf"
    with pytest.raises(ArtifactError, match="of another base model: its layer .*q_proj"):
        export_gguf_lora(tmp_path / "adapter", out, base=tiny_qwen2(hidden_size=16))
    unknown = get_peft_model(tiny_gpt2(), FrozenCoreConfig(constructor="random", r=2, target_modules=["c_attn"]))
    with pytest.raises(ModelError, match="written for llama, .* base model is 'gpt2'. Export a LoRA"):
        export_gguf_lora(unknown, out)
    tied = get_peft_model(tiny_model("qwen2"), FrozenCoreConfig(constructor="random", r=2, target_modules=["lm_head"]))
    with pytest.raises(ModelError, match="no layer of its own for 'lm_head'"):
        export_gguf_lora(tied, out)
    base.unlink()
    with pytest.raises(ConfigError, match="names none that lies here: give base="):
        export_gguf_lora(tmp_path / "adapter", out)
    assert not list(tmp_path.glob("*lora*"))
    out.write_text("mine")
    with pytest.raises(ArtifactError, match="is there already. Choose another file"):
        export_gguf_lora(tmp_path / "adapter", out)
    assert out.read_text() == "mine"


def test_the_command_says_how_llama_cpp_takes_it(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    base = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    saved_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    file = tmp_path / "lora.gguf"
    status, out, err = command("export", tmp_path / "adapter", "--to", "gguf-lora", "--out", file)
    assert (status, err) == (0, "")
    said = "".join(out.split())  # a narrow screen breaks lines
    assert f"LoRAforllama.cpp:{file},rank3,4layersofllama" in said
    assert f"llama-server--model{base}--lora{file}" in said


@pytest.mark.slow
def test_every_layer_of_smollm2_gets_its_own_rows(tmp_path: Path) -> None:
    """B A, put back into transformers' order by index, is s·P R Qᵀ on all of its 210 layers."""
    base = SHARED / "models" / "smollm2"
    if not base.is_dir():
        pytest.skip("no ../shared beside this checkout")
    native = saved_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    found = export_gguf_lora(native, tmp_path / "lora.gguf")
    lora, heads = tensors_of(tmp_path / "lora.gguf"), {"q_proj": 9, "k_proj": 3}
    assert len(found.layers) == 210
    for layer in found.layers:
        name, last = f"{gguf_name(layer)}.weight", layer.rpartition(".")[2]
        core = native.get_submodule(f"base_model.model.{layer}")
        P, Q, R = core.factors("default")
        update = core.frozencore_scale["default"] * P @ R @ Q.T
        kept = interleaved(update, heads[last]) if last in heads else update
        torch.testing.assert_close(lora[f"{name}.lora_b"] @ lora[f"{name}.lora_a"], kept, rtol=1e-4, atol=1e-6)
