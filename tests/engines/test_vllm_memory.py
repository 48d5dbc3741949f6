"""Tenants that enter a running vLLM from memory, without a folder: each answers as its own native adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from safetensors.torch import load, save

from fixtures import ROOT
from frozencore import export_basis_model, tenant_weights
from frozencore_basis_model import ENTRY
from serving import Referee, cores_on, environment_of, load_base
from tiny import train_at_random

pytestmark = pytest.mark.slow

RANK, NUM_TOKENS = 8, 8
PROMPTS = [[1, 40, 77, 300], [1, 9, 255, 31, 8]]


@pytest.fixture(scope="module")
def native(base: Path) -> PeftModel:
    return cores_on(load_base(base), alpha=12.0, rank_pattern={"q_proj": 4})


@pytest.fixture(scope="module")
def basis_model(base: Path, native: PeftModel, folder: Path) -> Path:
    native.save_pretrained(folder / "adapter")
    return export_basis_model(folder / "adapter", folder / "model", base=base).directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def engine(basis_model: Path) -> Iterator[Any]:
    with started(basis_model, RANK) as driven:
        yield driven


@contextmanager
def started(model: Path, rank: int) -> Iterator[Any]:
    """The engine that benchmarks/served.py drives."""
    environment_of("vllm")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "benchmarks")
        from served import Driven
    log = model.parent / f"{model.name}.log"
    driven = Driven(log, model=str(model), slots=2, rank=rank, rows=4, targets=["core"], known=3)
    yield driven
    driven.end()


def weights_of(native: PeftModel, tenant: int, folder: Path) -> str:
    """Gives the adapter a tenant's cores; the file of their weights."""
    train_at_random(native, size=0.3, seed=tenant)
    (folder / str(tenant)).write_bytes(tenant_weights(native))
    return str(folder / str(tenant))


def test_tenants_enter_from_memory_and_answer_as_their_native_adapters(
    engine: Any, native: PeftModel, folder: Path
) -> None:
    """Three tenants on two slots."""
    engine.say("put", files=[weights_of(native, tenant, folder) for tenant in range(3)])
    for tenant in range(3):
        answer = engine.say("generate", prompts=PROMPTS, num_tokens=NUM_TOKENS, tenants=1, first=tenant)
        train_at_random(native, size=0.3, seed=tenant)
        referee = Referee(native)
        assert answer["tokens"] == [referee.greedy(*pair) for pair in zip(PROMPTS, answer["tokens"], strict=True)]


def test_rows_of_the_base_model_stand_beside_a_tenants_rows_in_one_batch(
    engine: Any, native: PeftModel, folder: Path
) -> None:
    """vLLM's own layers would give such rows the adapter of the last slot."""
    files = [weights_of(native, tenant, folder) for tenant in range(2)]
    engine.say("put", files=files)
    asked = {"prompts": [PROMPTS[0], *PROMPTS], "num_tokens": NUM_TOKENS}
    mixed = engine.say("generate", tenants=1, first=4, bare=1, **asked)["tokens"]
    with native.disable_adapter():
        assert mixed[0] == Referee(native).greedy(PROMPTS[0], mixed[0])
    referee = Referee(native)
    assert mixed[1:] == [referee.greedy(*pair) for pair in zip(PROMPTS, mixed[1:], strict=True)]


def test_a_tenant_of_another_basis_is_refused_and_said_in_one_line(
    engine: Any, native: PeftModel, folder: Path
) -> None:
    other = folder / "other"
    other.write_bytes(save(load(tenant_weights(native)), {"format": "pt", ENTRY: "0" * 32}))
    with pytest.raises(SystemExit, match=f"The tenant has a core on the basis {'0' * 32}, but this model has"):
        engine.say("put", files=[str(other)])
