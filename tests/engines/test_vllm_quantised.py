"""A basis model whose base layers vLLM quantises: tenants answer as native adapters on the quantised base model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from frozencore import export_basis_model, export_tenant
from serving import FOR_CORES, NUM_TOKENS, PROMPTS, TOLERANCE, Referee, VllmServer, cores_on
from tiny import train_at_random

pytest.importorskip("torchao")

from torchao.core.config import config_to_dict
from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("bits", [8, 4])
def test_p_q_and_cores_stay_as_they_are_on_a_base_that_vllm_quantises(bits: int, base: Path, tmp_path: Path) -> None:
    """With Q in int8 too, log-probabilities are 0.05 off."""
    way = {8: Int8WeightOnlyConfig(), 4: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))}[bits]
    quantised = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=TorchAoConfig(way)
    )  # fmt: skip
    native = cores_on(quantised)
    native.save_pretrained(tmp_path / "adapter")
    export_basis_model(tmp_path / "adapter", tmp_path / "model", base=base)
    told = tmp_path / "torchao.json"
    told.write_text(json.dumps(config_to_dict(FqnToConfig({r"re:.*\.(P|Q|core)": None, "_default": way}))))

    flags = [
        *FOR_CORES,
        "--quantization",
        "torchao",
        "--hf-overrides",
        json.dumps({"quantization_config_file": str(told)}),
    ]
    referee = Referee(native)
    with VllmServer(tmp_path / "model", tmp_path / "log", *flags) as server:
        for tenant, prompt in enumerate(PROMPTS):
            train_at_random(native, size=0.3, seed=tenant)
            export_tenant(native, tmp_path / str(tenant))
            server.load(str(tenant), tmp_path / str(tenant))
            answer = server.ask(str(tenant), prompt, NUM_TOKENS)
            assert answer.tokens == referee.greedy(prompt, answer.tokens)
            assert referee.error(prompt, answer) < TOLERANCE
