"""Tenants that vLLM's own resolver loads when a request names them, and what a changed folder does: docs/serving.md."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from peft import PeftModel

from frozencore import export_basis_model, export_tenant
from serving import FOR_CORES, NUM_TOKENS, PROMPTS, TOLERANCE, Referee, RefusedError, VllmServer, cores_on, load_base
from tiny import train_at_random

pytestmark = pytest.mark.slow

SLOTS, OLD, NEW = 2, 100, 101
LONG = (PROMPTS[2] * 5)[:200]  # longer than a block of the prefix cache
FEW = ["--max-loras", str(SLOTS), "--max-cpu-loras", str(SLOTS)]
Write = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def native(base: Path) -> PeftModel:
    return cores_on(load_base(base))


@pytest.fixture(scope="module")
def room(base: Path, native: PeftModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working folder, with a basis model in ``shop/model``."""
    folder = tmp_path_factory.mktemp("on-demand")
    native.save_pretrained(folder / "adapter")
    export_basis_model(folder / "adapter", folder / "shop/model", base=base)
    (folder / "served").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver,frozencore_basis_model")
        patch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", "served")
        yield folder


@pytest.fixture(scope="module")
def write(room: Path, native: PeftModel) -> Write:
    """Writes a tenant with cores of a seed in place of what was there."""

    def write(place: str, seed: int) -> Path:
        train_at_random(native.float(), size=0.3, seed=seed)
        return export_tenant(native, place, basis_model="shop/model", overwrite=True).directory

    return write


@pytest.fixture(scope="module")
def server(room: Path) -> Iterator[VllmServer]:
    with VllmServer(Path("shop/model"), room / "log", *FOR_CORES, *FEW) as server:
        yield server


@pytest.fixture
def wrong(server: VllmServer, native: PeftModel) -> Callable[..., list[bool]]:
    """Says of each seed whether the answer of a name differs from that of its native adapter in float64."""

    def wrong(name: str, *seeds: int, prompt: list[int] = PROMPTS[0]) -> list[bool]:
        answer, found = server.ask(name, prompt, NUM_TOKENS), []
        for seed in seeds:
            train_at_random(native.float(), size=0.3, seed=seed)
            found.append(Referee(native.double()).error(prompt, answer) > TOLERANCE)
        return found

    return wrong


Wrong = Callable[..., list[bool]]


def test_tenants_that_were_never_loaded_answer_as_their_native_adapters_and_more_than_slots_wait(
    server: VllmServer, write: Write, native: PeftModel
) -> None:
    names = [str(seed) for seed in range(3 * SLOTS)]
    for name in names:
        write(f"served/{name}", int(name))
    with ThreadPoolExecutor(len(names)) as threads:
        answers = list(threads.map(lambda name: server.ask(name, PROMPTS[0], NUM_TOKENS), names))
    for name, answer in zip(names, answers, strict=True):
        train_at_random(native.float(), size=0.3, seed=int(name))
        assert answer.tokens == Referee(native.double()).greedy(PROMPTS[0], answer.tokens)
    assert len({tuple(answer.tokens) for answer in answers}) > SLOTS


def test_a_name_without_a_folder_or_of_another_model_is_unknown_and_a_damaged_one_refused(
    server: VllmServer, write: Write, wrong: Wrong, native: PeftModel, room: Path
) -> None:
    export_tenant(native, "served/absolute", basis_model=room / "shop/model")
    for name in ("nobody", "absolute"):
        with pytest.raises(RefusedError, match="404"):
            server.ask(name, PROMPTS[0], 1)
    weights = write("served/damaged", 0) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(RefusedError, match="400"):
        server.ask("damaged", PROMPTS[0], 1)
    write("served/whole", 0)
    assert wrong("whole", 0) == [False]


def test_a_name_may_be_a_path_that_leads_out_of_the_folder(write: Write, wrong: Wrong) -> None:
    """Why docs/serving.md asks for a proxy that checks names."""
    write("elsewhere/secret", 7)
    assert wrong("../elsewhere/secret", 7) == [False]


def test_a_new_version_under_a_new_name_or_unloaded_and_loaded_at_a_new_path_is_served(
    server: VllmServer, write: Write, wrong: Wrong
) -> None:
    write("served/anna", OLD)
    assert wrong("anna", OLD, prompt=LONG) == [False]
    write("served/anna-2", NEW)
    assert wrong("anna-2", NEW, prompt=LONG) == [False]
    server.unload("anna")
    server.load("anna", Path("served/anna-2"))
    assert wrong("anna", NEW, prompt=LONG) == [False]


def test_a_replaced_folder_is_not_read_until_unloaded_and_then_mixes_with_cached_prompts(
    server: VllmServer, write: Write, wrong: Wrong
) -> None:
    write("served/ben", OLD)
    assert wrong("ben", OLD, prompt=LONG) == [False]
    write("served/ben", NEW)
    assert wrong("ben", OLD, NEW) == [False, True]
    server.unload("ben")
    assert wrong("ben", OLD, NEW) == [True, False]
    assert wrong("ben", OLD, NEW, prompt=LONG) == [True, True]


def test_an_unloaded_tenant_keeps_its_place_and_a_tenant_that_others_push_out_is_read_again(
    server: VllmServer, write: Write, wrong: Wrong
) -> None:
    for name in ("first", "unloaded", "third"):
        write(f"served/{name}", OLD)
    assert wrong("first", OLD) + wrong("unloaded", OLD) == [False, False]
    server.unload("unloaded")
    write("served/first", NEW)
    assert wrong("third", OLD) == [False]  # takes the place of the first, which was asked least recently
    assert wrong("first", OLD, NEW) == [True, False]


def test_load_inplace_reads_the_folder_at_every_later_request_until_unloaded(
    server: VllmServer, write: Write, wrong: Wrong
) -> None:
    """vllm#33791: the flag stays on the stored request."""
    folder = write("served/carol", OLD)
    server.load("carol", folder, in_place=True)
    assert wrong("carol", OLD) == [False]
    write("served/carol", NEW)
    assert wrong("carol", OLD, NEW) == [True, False]
    server.unload("carol")
    server.load("carol", folder)
    write("served/carol", OLD)
    assert wrong("carol", OLD, NEW) == [True, False]


def test_a_request_for_a_tenant_whose_folder_was_deleted_ends_the_engine(
    server: VllmServer, write: Write, wrong: Wrong
) -> None:
    """The last test, because the server is gone after it."""
    for name in ("gone", "one", "two"):
        write(f"served/{name}", OLD)
        assert wrong(name, OLD) == [False]
    shutil.rmtree("served/gone")
    with pytest.raises(RefusedError, match="500"):
        server.ask("gone", PROMPTS[0], 1)
    with pytest.raises((RefusedError, OSError)):
        server.ask("two", PROMPTS[0], 1)
