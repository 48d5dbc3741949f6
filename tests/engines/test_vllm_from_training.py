"""Tenants that vLLM reads from the folder that training wrote (``FROZENCORE_TENANTS``), in values of any bits."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from frozencore import Core, export_basis_model, save_basis, swap_core
from frozencore.adapter.folders import read_adapter
from serving import FOR_CORES, NUM_TOKENS, PROMPTS, TOLERANCE, Referee, RefusedError, VllmServer, cores_on, load_base
from tiny import train_at_random

pytestmark = pytest.mark.slow

SLOTS, KEPT, TENANTS, OLD, NEW = 64, 80, 1_000, 100, 101
LONG = (PROMPTS[2] * 5)[:200]  # longer than a block of the prefix cache
FEW = ["--max-loras", str(SLOTS), "--max-cpu-loras", str(KEPT)]
Write = Callable[..., Path]
Wrong = Callable[..., bool]


@pytest.fixture(scope="module")
def native(base: Path, tmp_path_factory: pytest.TempPathFactory) -> PeftModel:
    model = cores_on(load_base(base))
    save_basis(model, tmp_path_factory.mktemp("shop") / "basis")
    return model


@pytest.fixture(scope="module")
def tenants(native: PeftModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants")


@pytest.fixture(scope="module")
def write(native: PeftModel, tenants: Path, tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes a tenant with cores of a seed, as training does, in place of what was there."""
    whole = tmp_path_factory.mktemp("whole")

    def write(name: str, seed: int, bits: int = 32) -> Path:
        train_at_random(native.float(), size=0.3, seed=seed)
        native.save_pretrained(str(whole))
        saved, folder = read_adapter(whole), tenants / name / "adapter"
        saved.write(folder, saved.core.in_bits(bits, saved.ranks), overwrite=True)
        return folder

    return write


@pytest.fixture(scope="module")
def server(
    base: Path, native: PeftModel, tenants: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("server")
    export_basis_model(native.peft_config["default"].basis, folder / "model", base=base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "frozencore_basis_model")
        patch.setenv("FROZENCORE_TENANTS", str(tenants))
        patch.setenv("FROZENCORE_CACHE", str(folder / "cache"))
        with VllmServer(folder / "model", folder / "log", *FOR_CORES, *FEW) as server:
            yield server


@pytest.fixture
def wrong(server: VllmServer, native: PeftModel) -> Wrong:
    """Says whether the answer of a name differs from that of an adapter's folder in float64."""

    def wrong(name: str, folder: Path, prompt: list[int] = PROMPTS[0]) -> bool:
        answer = server.ask(name, prompt, NUM_TOKENS)
        swap_core(native.float(), folder)
        return Referee(native.double()).error(prompt, answer) > TOLERANCE

    return wrong


@pytest.mark.parametrize("bits", [32, 8, 4, 2])
def test_a_tenant_that_was_never_exported_answers_as_its_native_adapter(bits: int, write: Write, wrong: Wrong) -> None:
    assert not wrong(f"bits-{bits}", write(f"bits-{bits}", 1, bits))


def test_a_replaced_tenant_answers_anew_at_the_next_request(write: Write, wrong: Wrong, tmp_path: Path) -> None:
    old = shutil.copytree(write("anna", OLD), tmp_path / "old")
    assert not wrong("anna", old, LONG)
    new = write("anna", NEW)
    assert not wrong("anna", new, LONG)
    assert wrong("anna", old, LONG)


def test_a_thousand_tenants_in_64_slots_answer_in_random_order(
    server: VllmServer, write: Write, native: PeftModel, tenants: Path
) -> None:
    saved = read_adapter(write("tenant-0", 0))
    for number in range(1, TENANTS):
        values = 0.3 * torch.randn(len(saved.core.values), generator=torch.Generator().manual_seed(number))
        saved.write(tenants / f"tenant-{number}" / "adapter", Core(saved.core.basis_id, values))
    order = random.Random(0).sample(range(TENANTS), TENANTS)
    with ThreadPoolExecutor(SLOTS) as threads:
        answers = list(threads.map(lambda number: server.ask(f"tenant-{number}", PROMPTS[0], 4), order))
    for number, answer in list(zip(order, answers, strict=True))[:: TENANTS // 50]:
        swap_core(native.float(), tenants / f"tenant-{number}" / "adapter")
        assert answer.tokens == Referee(native.double()).greedy(PROMPTS[0], answer.tokens)


def test_an_error_is_that_of_its_request_and_nothing_ends_the_engine(
    server: VllmServer, base: Path, write: Write, wrong: Wrong, tenants: Path
) -> None:
    for name in ("nobody", "../tenants/anna", "anna/adapter"):
        with pytest.raises(RefusedError, match="404"):
            server.ask(name, PROMPTS[0], 1)
    weights = write("damaged", 0) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(RefusedError, match="400.*is damaged"):
        server.ask("damaged", PROMPTS[0], 1)
    cores_on(load_base(base), alpha=3.0).save_pretrained(tenants / "other")
    with pytest.raises(RefusedError, match="400.*A core works on one basis only"):
        server.ask("other", PROMPTS[0], 1)
    gone = write("gone", OLD)
    assert not wrong("gone", gone)
    shutil.rmtree(tenants / "gone")
    for number in range(KEPT + 1):  # which push it out
        write(f"after-{number}", number)
        server.ask(f"after-{number}", PROMPTS[0], 1)
    with pytest.raises(RefusedError, match="404"):
        server.ask("gone", PROMPTS[0], 1)
    assert not wrong("whole", write("whole", NEW))
