"""A thousand tenants of one basis model in one vLLM process, over HTTP: each answer is its own native adapter's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import pytest
import torch
from peft import PeftModel

from frozencore import export_basis_model, export_tenant
from serving import FOR_CORES, Referee, RefusedError, VllmServer, cores_on, load_base
from tiny import train_at_random

pytestmark = pytest.mark.slow

TENANTS, SLOTS, NUM_TOKENS = 1000, 64, 8


@pytest.fixture(scope="module")
def native(base: Path) -> PeftModel:
    """One adapter, whose cores are set to a tenant's with its number as the seed."""
    return cores_on(load_base(base), alpha=12.0, rank_pattern={"q_proj": 5})


def become(model: PeftModel, tenant: int) -> None:
    train_at_random(model, size=0.3, seed=tenant)


@pytest.fixture(scope="module")
def folders(base: Path, native: PeftModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The basis model, and a folder for every tenant."""
    folder = tmp_path_factory.mktemp("tenants")
    native.save_pretrained(folder / "adapter")
    export_basis_model(folder / "adapter", folder / "model", base=base)
    for tenant in range(TENANTS):
        become(native, tenant)
        export_tenant(native, folder / str(tenant), basis_model=folder / "model" if tenant == 0 else None)
    return folder


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[VllmServer]:
    flags = ["--max-loras", str(SLOTS), "--max-cpu-loras", str(TENANTS), "--max-num-seqs", str(SLOTS)]
    with VllmServer(folders / "model", folders / "log", *FOR_CORES, *flags) as server:
        yield server


def prompt_of(tenant: int) -> list[int]:
    return [1, *torch.randint(3, 500, (5 + tenant % 11,), generator=torch.Generator().manual_seed(tenant)).tolist()]


def test_a_thousand_tenants_come_answer_as_their_native_adapters_and_go(
    server: VllmServer, folders: Path, native: PeftModel
) -> None:
    entered = []
    for tenant in range(TENANTS):
        begins = perf_counter()
        server.load(str(tenant), folders / str(tenant))
        entered.append(perf_counter() - begins)
    begins = perf_counter()
    with ThreadPoolExecutor(SLOTS) as threads:
        answers = list(threads.map(lambda t: server.ask(str(t), prompt_of(t), NUM_TOKENS), range(TENANTS)))
    answered = perf_counter() - begins
    referee, different = Referee(native.double()), []
    for tenant, answer in enumerate(answers):
        become(native, tenant)
        assert len(answer.tokens) == NUM_TOKENS
        if answer.tokens != referee.greedy(prompt_of(tenant), answer.tokens):
            different.append(tenant)
    entered.sort()
    print(
        f"{TENANTS} tenants entered in {sum(entered):.1f} s, each in {entered[TENANTS // 2] * 1e3:.1f} ms (median; "
        f"{entered[TENANTS * 95 // 100] * 1e3:.1f} ms for 95 %), {TENANTS * NUM_TOKENS} tokens in {answered:.1f} s"
    )
    assert different == []
    assert len({tuple(answer.tokens) for answer in answers}) > TENANTS / 2
    for tenant in range(TENANTS):
        server.unload(str(tenant))
    with pytest.raises(RefusedError, match="404"):
        server.ask("7", prompt_of(7), 1)


@pytest.mark.parametrize(
    ("flags", "plugins"),
    [(["--trust-remote-code"], ""), (["--tensor-parallel-size", "2"], "frozencore_basis_model")],
    ids=["by the code in its folder", "in two processes"],
)
def test_a_basis_model_is_served_in_other_ways_too(
    flags: list[str], plugins: str, folders: Path, base: Path, native: PeftModel, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    export_basis_model(folders / "adapter", tmp_path / "model", base=base, with_code=True)
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    referee = Referee(native.double())
    with VllmServer(tmp_path / "model", tmp_path / "log", *FOR_CORES, "--max-loras", "4", *flags) as server:
        for tenant in range(4):
            server.load(str(tenant), folders / str(tenant))
            answer = server.ask(str(tenant), prompt_of(tenant), NUM_TOKENS)
            become(native, tenant)
            assert answer.tokens == referee.greedy(prompt_of(tenant), answer.tokens)
