"""``frozencore check`` and llama.cpp agree: what it says of a directory is what converter and server do with it.

llama.cpp takes a directory if it is converted, loaded, and answers as PEFT does in float64.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor

from frozencore import check_lora_directory
from serving import (
    DIRECTORIES,
    ForeignLora,
    LlamaServer,
    RefusedError,
    by_peft,
    changed,
    convert,
    environment_of,
    serves_right,
)
from tiny import tiny_gpt2

pytestmark = pytest.mark.slow

READ = """
import json, sys
sys.path.insert(0, sys.prefix + "/src/gguf-py")
from gguf import GGUFReader
print(json.dumps({tensor.name: tensor.data.tolist() for tensor in GGUFReader(sys.argv[1]).tensors}))
"""


@pytest.fixture(scope="module")
def converted(base: Path, foreign: dict[str, ForeignLora], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The gguf files of those that the converter takes, and ``base``."""
    folder = tmp_path_factory.mktemp("gguf")
    outs = {name: folder / f"{lora.folder.name}.gguf" for name, lora in foreign.items()}
    model = {folder / "base.gguf": base}
    reasons = convert(model, {out: (foreign[name].folder, base) for name, out in outs.items()})
    assert reasons[folder / "base.gguf"] is None
    return {"base": folder / "base.gguf", **{name: out for name, out in outs.items() if reasons[out] is None}}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_llama_cpp_takes_what_the_check_says_it_takes_and_nothing_else(
    name: str, converted: dict[str, Path], foreign: dict[str, ForeignLora], tmp_path: Path
) -> None:
    served = False
    if name in converted:
        try:
            with LlamaServer(converted["base"], tmp_path / "log", [converted[name]]) as server:
                served = serves_right(lambda prompt: server.ask(prompt, 16, converted[name]), foreign[name])
        except RefusedError:
            served = False
    assert ("llama.cpp" in foreign[name].report.engines) == served


def test_a_tenant_of_a_basis_model_is_not_converted(base: Path, tmp_path: Path) -> None:
    def to_cores(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for key in list(tensors):
            tensors[key.replace(".lora_", ".core.lora_")] = tensors.pop(key)

    changed(to_cores)(base, tmp_path / "tenant")
    assert "llama.cpp" not in check_lora_directory(tmp_path / "tenant").engines
    reason = convert({}, {tmp_path / "tenant.gguf": (tmp_path / "tenant", base)})[tmp_path / "tenant.gguf"]
    assert "core.weight" in str(reason)


def test_a_square_conv1d_layer_is_converted_to_its_transpose_without_a_word(tmp_path: Path) -> None:
    tiny_gpt2().save_pretrained(tmp_path / "gpt2")
    config = LoraConfig(r=3, lora_alpha=3, target_modules=["attn.c_proj"], fan_in_fan_out=True)
    by_peft(tmp_path / "gpt2", tmp_path / "lora", config)
    assert "llama.cpp" not in check_lora_directory(tmp_path / "lora").engines
    out = tmp_path / "lora.gguf"
    assert convert({}, {out: (tmp_path / "lora", tmp_path / "gpt2")}) == {out: None}
    read = [environment_of("llama.cpp") / "bin" / "python", "-c", READ, out]
    done = subprocess.run(read, capture_output=True, text=True, check=True)
    found = {name: torch.tensor(values) for name, values in json.loads(done.stdout).items()}
    written = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    own = "base_model.model.transformer.h.0.attn.c_proj.lora_{}.weight"
    update = written[own.format("B")] @ written[own.format("A")]
    served = found["blk.0.attn_output.weight.lora_b"] @ found["blk.0.attn_output.weight.lora_a"]
    torch.testing.assert_close(served, update.mT)
    assert (update - update.mT).abs().max() > 0.01
