"""Crafted adapters and bases are refused in one line by every function that reads them.

A case is a sound folder with one thing that a stranger may write: a damaged file, another type, a number that is too
large, an expression in place of names, a tensor of the base model. Checksums and identities are made anew where the
value itself is what is met.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from frozencore import (
    CoreBank,
    FrozenCoreConfig,
    export_basis_model,
    export_lora,
    export_merged,
    export_tenant,
    load_basis,
    merge_adapters,
    pack_adapter,
    save_basis,
    set_bases,
    swap_core,
    unpack_adapter,
)
from frozencore.adapter.folders import read_adapter, read_adapter_or_basis
from frozencore.adapter.report import inspect_adapter
from frozencore.adapter.saved.tensors import hash_tensors
from frozencore.errors import FrozenCoreError
from frozencore.files.adapter_folder import LARGEST_CONFIG
from frozencore.files.fingerprint import fingerprint_options
from frozencore.tune.evaluate import BaseWithAdapter
from tiny import set_values

WEIGHTS, CONFIG, HEADER, FACTORS = "adapter_model.safetensors", "adapter_config.json", "basis.json", "basis.safetensors"
HUGE = int("9" * 400)
ENDLESS = "(([a-z_]+)+)+X"  # re needs years for the name of a layer
Q_PROJ = "model.layers.0.self_attn.q_proj"


def tiny_base() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def random_cores(seed: int = 0) -> PeftModel:
    config = FrozenCoreConfig(
        r=2, target_modules=["q_proj", "v_proj"], constructor="random", coordinates="qr", seed=seed
    )
    return get_peft_model(tiny_base(), config)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound folders: an adapter, one of cores alone with its basis inside, and their base model."""
    folder = tmp_path_factory.mktemp("made")
    random_cores().save_pretrained(str(folder / "adapter"))
    on_basis = random_cores()
    save_basis(on_basis, folder / "cores" / "basis")
    on_basis.save_pretrained(str(folder / "cores"))
    tiny_base().save_pretrained(folder / "base")
    for kind in ("adapter", "cores"):
        set_values(folder / kind, base_model_name_or_path=str(folder / "base"), task_type="CAUSAL_LM")
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def ways_in(made: Path) -> dict[str, Callable[[Path], object]]:
    """The functions that read an adapter's folder, by name."""
    base, numbers = tiny_base(), itertools.count()

    def loaded() -> PeftModel:
        return PeftModel.from_pretrained(tiny_base(), str(made / "adapter"))

    def written(write: Callable[[Path, Path], object]) -> Callable[[Path], None]:
        def do(folder: Path) -> None:
            out = made / "written" / str(next(numbers))
            out.parent.mkdir(exist_ok=True)
            try:
                write(folder, out)
            finally:
                shutil.rmtree(out, ignore_errors=True)

        return do

    return {
        "PEFT": lambda folder: PeftModel.from_pretrained(tiny_base(), str(folder)),
        "AutoPeftModel": lambda folder: AutoPeftModelForCausalLM.from_pretrained(str(folder)),
        "PEFT, a second adapter": lambda folder: loaded().load_adapter(str(folder), adapter_name="second"),
        "read": read_adapter,
        "inspect": lambda folder: inspect_adapter(*read_adapter_or_basis(folder)),
        "evaluate": lambda folder: BaseWithAdapter(tiny_base()).with_adapter(folder),
        "LoRA": written(lambda folder, out: export_lora(folder, out, base=base)),
        "merged": written(lambda folder, out: export_merged(folder, out, base=made / "base")),
        "tenant": written(export_tenant),
        "basis model": written(lambda folder, out: export_basis_model(folder, out, base=made / "base")),
        "bank": lambda folder: CoreBank(loaded(), 1).put("a", folder),
        "swap": lambda folder: swap_core(loaded(), folder),
        "pack": written(lambda folder, out: pack_adapter(folder, made / "cores" / "basis", out)),
        "unpack": written(unpack_adapter),
        "sum": written(lambda folder, out: merge_adapters([folder, folder], out)),
    }


def ways_into_a_basis() -> dict[str, Callable[[Path], object]]:
    return {
        "load_basis": load_basis,
        "inspect": lambda folder: inspect_adapter(*read_adapter_or_basis(folder)),
        "configuration": lambda folder: get_peft_model(tiny_base(), FrozenCoreConfig(basis=str(folder))),
        "set_bases": lambda folder: set_bases(random_cores(), load_basis(folder)),
    }


NOT_OF = {"adapter": {"unpack"}, "cores": {"pack", "bank", "swap"}}  # functions that refuse a sound folder of this kind
ALL = frozenset(ways_in(Path()))
ONTO_A_MODEL = frozenset({"PEFT", "AutoPeftModel", "PEFT, a second adapter", "evaluate", "merged"})
OURS = ALL - {"PEFT", "AutoPeftModel", "PEFT, a second adapter"}  # PEFT itself reads some files before us
BASIS = frozenset(ways_into_a_basis())
MAKES_LAYERS = frozenset({"configuration"})


class Case(NamedTuple):
    """What is crafted, the functions that must refuse it, and what their errors say."""

    kind: str
    craft: Callable[[Path], object]
    refuse: frozenset[str] = ALL
    message: str = ""


def values(where: frozenset[str] = ONTO_A_MODEL, message: str = "", kind: str = "adapter", **changed: Any) -> Case:
    """Values in the configuration."""
    return Case(kind, lambda folder: set_values(folder, **changed), where, message)


def changed_by_hand(name: str, to: Any, kind: str = "adapter") -> Case:
    """A value that changes what is computed, with the checksum of the saved one."""

    def craft(folder: Path) -> None:
        content = json.loads((folder / CONFIG).read_text())
        assert content.get(name, ...) != to
        (folder / CONFIG).write_text(json.dumps(content | {name: to}))

    return Case(kind, craft, ALL, "checksum differs|holds none|holds no such|another saved basis")


def foreign(key: str, kind: str = "adapter", **values: Any) -> Case:
    """One tensor more, which would change the base model if it were loaded; the hashes are those of the file."""

    def craft(folder: Path) -> None:
        held = load_file(folder / WEIGHTS) | {f"base_model.model.{key}": torch.full((20, 16), 0.5)}
        save_file(held, folder / WEIGHTS, {"format": "pt"})
        set_values(folder, tensors_sha256=hash_tensors(held), **values)

    return Case(kind, craft, ALL, re.escape(f"also holds 'base_model.model.{key}'"))


def tensors(part: str, change: Callable[[Tensor], Tensor], message: str = "", kind: str = "adapter") -> Case:
    """Other tensors under the names that end so, with their hash."""
    return edited(lambda held: {k: change(X) if k.endswith(part) else X for k, X in held.items()}, message, kind)


def edited(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str = "", kind: str = "adapter") -> Case:
    def craft(folder: Path) -> None:
        held = change(load_file(folder / WEIGHTS))
        save_file({key: X.contiguous() for key, X in held.items()}, folder / WEIGHTS, {"format": "pt"})
        set_values(folder, tensors_sha256=hash_tensors(held))

    return Case(kind, craft, ALL, message)


def header(*keys: str, to: Any, where: frozenset[str] = BASIS, message: str = "") -> Case:
    """A value in ``basis.json``, with the identity that this gives."""

    def craft(folder: Path) -> None:
        file = folder / HEADER
        content = json.loads(file.read_text())
        place = content
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = to
        if keys != ("identity",):
            content["identity"] = fingerprint_options({k: v for k, v in content.items() if k != "identity"})
        file.write_text(json.dumps(content))

    return Case("basis", craft, where, message)


def file(
    name: str, change: Callable[[bytes], bytes], message: str, kind: str = "adapter", refuse: frozenset[str] = ALL
) -> Case:
    """Other bytes in a file."""
    return Case(kind, lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())), refuse, message)


def flipped(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


def terabytes(_: bytes) -> bytes:
    claim = json.dumps({"x": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}).encode()
    return len(claim).to_bytes(8, "little") + claim + bytes(16)


def replaced(by: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: ((folder / WEIGHTS).unlink(), by(folder))


def leave_a_pickle(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(folder / "opened"),)

    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))


def write_half(folder: Path) -> None:
    """A newer adapter's weights are there, its configuration is not yet."""
    before = (folder / CONFIG).read_bytes()
    random_cores(seed=3).save_pretrained(str(folder))
    (folder / CONFIG).write_bytes(before)


def another_basis(folder: Path) -> None:
    """Orthonormal too."""
    held = load_file(folder / WEIGHTS)
    key = next(key for key in held if key.endswith("_P"))
    save_file(held | {key: held[key].flip(0)}, folder / WEIGHTS, metadata={"format": "pt"})


def exchanged(folder: Path) -> None:
    """Two tensors of one shape under each other's name."""
    held = load_file(folder / WEIGHTS)
    one, other = (f"base_model.model.{Q_PROJ[:-6]}{side}_proj.frozencore_Q" for side in "qv")
    save_file(held | {one: held[other], other: held[one]}, folder / WEIGHTS, metadata={"format": "pt"})


def named(place: str) -> Case:
    """A name of a basis that no file may have, and no basis beside the cores."""
    return Case("cores", lambda folder: (shutil.rmtree(folder / "basis"), set_values(folder, basis=place)))


NO_FILE = f"has no {WEIGHTS}"
EXPRESSION = r"holds the expression .* Write the layers' full names"
CASES: dict[str, Case] = {
    # the file of weights
    "truncated": file(WEIGHTS, lambda content: content[:-100], "is damaged"),
    "garbage": file(WEIGHTS, lambda _: bytes(range(256)) * 40, "is damaged"),
    "a flipped bit": file(WEIGHTS, flipped, "are not those that were saved"),
    "a header that claims terabytes": file(WEIGHTS, terabytes, "is damaged"),
    "a pickle": Case("adapter", replaced(leave_a_pickle), message="never opened"),
    "a link to itself": Case("adapter", replaced(lambda f: (f / WEIGHTS).symlink_to(WEIGHTS)), message=NO_FILE),
    "a pipe": Case("adapter", replaced(lambda f: os.mkfifo(f / WEIGHTS)), message=NO_FILE),
    "no weights": Case("adapter", replaced(lambda _: None), OURS, NO_FILE),
    "written while read": Case("adapter", write_half, message="just being written"),
    "another basis under the cores": Case("adapter", another_basis, message="tensors of .* are not those"),
    "two tensors exchanged": Case("adapter", exchanged, message="tensors of .* are not those"),
    # the file of the configuration
    "truncated JSON": file(CONFIG, lambda content: content[:40], "is damaged", refuse=OURS),
    "nested JSON": file(CONFIG, lambda _: b"[" * 100_000, "is damaged", refuse=OURS),
    "no object": file(CONFIG, lambda _: b"[1]", "no JSON object", refuse=OURS),
    "many megabytes": file(CONFIG, lambda content: content + b" " * LARGEST_CONFIG, "larger than 16,777,216 bytes"),
    "no configuration": Case("adapter", lambda f: (f / CONFIG).unlink(), OURS, f"has no {CONFIG}"),
    "an unknown type": values(OURS, "OF_TOMORROW", peft_type="OF_TOMORROW"),
    "no checksum": Case("adapter", lambda f: (f / CONFIG).write_text((f / CONFIG).read_text().replace("checksum", "x")),
                        ALL, "their checksum differs"),
    "a hash that is a list": values(ALL, "", tensors_sha256=[1]),
    "a record of the base model that is a list": values(base_record=[1]),
    # a value that changes what is computed
    **{f"another {name}": changed_by_hand(name, to) for name, to in {
        "r": 1, "alpha": 3.0, "rank_pattern": {"q_proj": 1}, "alpha_pattern": {"q_proj": 3.0},
        "target_modules": ["q_proj"], "exclude_modules": ["q_proj"], "layers_to_transform": [0],
        "modules_to_save": ["norm"], "trainable_token_indices": [1], "ensure_weight_tying": True, "constructor": "vera",
        "coordinates": "raw", "seed": 1, "init_weights": False, "load_bases": False, "base_record": None,
        "tensors_sha256": None, "svd_method": "full", "damping": 0.1}.items()},
    **{f"another {name} of cores": changed_by_hand(name, to, "cores") for name, to in {
        "r": 1, "alpha": 3.0, "rank_pattern": {"q_proj": 1}, "target_modules": ["q_proj"], "basis_id": "0" * 64
    }.items()},
    "a rank of 0 with its checksum": values(ALL, "", rank_pattern={"q_proj": 0}),
    "another rank of cores with its checksum": values(ALL, "", "cores", r=1),
    "another scale of one layer of cores": values(ALL, "", "cores", alpha_pattern={"q_proj": 3.0}),
    # a tensor of the base model
    **{f"a foreign {key}": foreign(key) for key in (
        "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.base_layer.weight",
        "model.layers.0.self_attn.q_proj.base_layer.bias", "lm_head.weight", "lm_head.base_layer.weight")},
    "a foreign tensor beside cores alone": foreign("model.norm.weight", "cores"),
    "the original of a trained module": foreign("lm_head.original_module.weight", modules_to_save=["lm_head"]),
    # values
    "a scale of 400 digits": values(alpha=HUGE),
    "a layer's scale of 400 digits": values(alpha_pattern={"q_proj": HUGE}),
    "a scale that is no finite number in float32": values(alpha=1e300),
    "an alpha pattern that is a number": values(alpha_pattern=7),
    "target_modules a number": values(target_modules=7),
    "target_modules a list in a list": values(target_modules=[["q_proj"]]),
    "target_modules empty": values(target_modules=[]),
    "target_modules with an empty name": values(target_modules=["q_proj", ""]),
    "a constructor that is a list": values(constructor=["random"]),
    "a rank of 400 digits for one layer": values(rank_pattern={"q_proj": HUGE}),
    "a rank pattern that is a list": values(rank_pattern=[1]),
    "modules_to_save of what is not in the file": values(ALL, "holds no such module", modules_to_save=["lm_head"]),
    "token indices of 10^12": values(trainable_token_indices=[10**12]),
    "negative token indices by name": values(trainable_token_indices={"embed_tokens": [-1]}),
    "token indices of no token": values(trainable_token_indices=[]),
    "tokens that are not in the file": values(ALL, "holds none of them", trainable_token_indices=[1]),
    "layers_to_transform a text": values(layers_to_transform="x"),
    # expressions in place of names
    "an expression of targets": values(ALL, EXPRESSION, target_modules=ENDLESS),
    "a broken expression of targets": values(ALL, "expression", target_modules="("),
    "an expression of excluded modules": values(ALL, EXPRESSION, exclude_modules=ENDLESS),
    "an expression of ranks": values(ALL, EXPRESSION, rank_pattern={ENDLESS: 2}),
    "an expression of scales": values(ALL, EXPRESSION, alpha_pattern={ENDLESS: 2.0}),
    "an expression of blocks": values(ALL, "expression", layers_pattern=[ENDLESS], layers_to_transform=[0]),
    "an expression of trained modules": values(ALL, "", modules_to_save=[ENDLESS]),
    # tensors
    "NaN": tensors("_R.weight", lambda X: torch.full_like(X, torch.nan), "holds NaN or Inf"),
    "Inf": tensors("_Q", lambda X: torch.full_like(X, torch.inf), "holds NaN or Inf"),
    "P not orthonormal": tensors("_P", lambda X: X * 1.02, "orthonormal"),
    "Q not orthonormal": tensors("_Q", lambda X: X * torch.tensor([1.0, 0.0]), "orthonormal"),
    "P in 8 bits": tensors("_P", lambda X: X.to(torch.float8_e4m3fn), "must hold floats"),
    "P complex": tensors("_P", lambda X: X.to(torch.complex64), "must hold floats"),
    "P a vector": tensors("_P", lambda X: X[:, 0], "must hold floats"),
    "Q of no rows": tensors("_Q", lambda X: X[:0], "must hold floats"),
    "cores that no float32 holds": tensors("_R.weight", lambda X: torch.full_like(X, 1e300, dtype=torch.float64)),
    "bases that no float32 holds": tensors("_P", lambda X: torch.full_like(X, 1e300, dtype=torch.float64)),
    "a layer without its core": edited(
        lambda held: {k: X for k, X in held.items() if not k.endswith("q_proj.frozencore_R.weight")},
        "where P, Q and R are needed",
    ),
    "no scales": edited(lambda held: {k: X for k, X in held.items() if "scales" not in k}, "the scale of each of its"),
    "scales of fewer layers": tensors("scales", lambda X: X[:1], "the scale of each of its"),
    "other scales than the configuration's": tensors("scales", lambda X: 2 * X, "at scale"),
    "scales of whole numbers": tensors("scales", lambda X: X.long(), "the scale of each of its"),
    "a record of the base model in no dtype": edited(
        lambda held: {**{k: X for k, X in held.items() if "_base_" not in k}, "frozencore_base_int3": torch.ones(16)},
        "record of its base model is malformed",
    )._replace(refuse=ONTO_A_MODEL),
    "a record of the base model of whole numbers": tensors(
        "_base_float32", lambda X: X.long(), "record of its base model is malformed"
    )._replace(refuse=ONTO_A_MODEL),
    "two records of the base model": edited(
        lambda held: {**held, "frozencore_base_int3": torch.ones(16)}, "also holds|record of its base"
    ),
    "no core at all": edited(lambda _: {}, "holds no frozen core"),
    "a name of a path": edited(lambda held: {**held, "../x": torch.zeros(1)}, "also holds"),
    "a name with an escape": edited(lambda held: {**held, "a\x1b[31m": torch.zeros(1)}, "also holds"),
    # cores alone
    "cores of whole numbers": tensors("", lambda X: X.to(torch.uint8), kind="cores"),
    "cores with NaN": tensors("", lambda X: torch.full_like(X, torch.nan), "holds NaN or Inf", "cores"),
    "cores beyond float32": tensors("", lambda X: torch.full_like(X, 3.5e38, dtype=torch.float64), "", "cores"),
    "fewer cores": tensors("", lambda X: X[:-1], "", "cores"),
    "cores of no basis": values(ALL, "does not say on which basis", "cores", basis_id=None, basis=None),
    "cores of two bases": edited(
        lambda held: {**held, "frozencore_cores_0": next(iter(held.values())).clone()}, "also holds", "cores"
    ),
    "cores of an unknown basis": values(ALL, "", "cores", basis_id="0" * 64),
    "cores at another scale": values(ALL, "scale", "cores", alpha=30.0),
    "a basis of 5000 letters": named("x" * 5000),
    "a basis with a zero byte": named("\x00"),
    "a basis of nobody": named("~nobody/x"),
    # a basis
    "a scale of a basis of 400 digits": header("scales", Q_PROJ, to=HUGE),
    "a scale of a basis beyond float32": header("scales", Q_PROJ, to=1e300),
    "scales that are a list": header("scales", to=[1]),
    "options that are a list": header("options", to=[1]),
    "a format of 400 digits": header("format", to=HUGE, message="this frozencore reads up to"),
    "an identity that is a list": header("identity", to=[1]),
    "targets of a basis a number": header("options", "target_modules", to=7, where=MAKES_LAYERS),
    "a rank of a basis of 400 digits": header("options", "r", to=HUGE, where=MAKES_LAYERS),
    "a constructor of a basis a list": header("options", "constructor", to=["random"], where=MAKES_LAYERS),
    "an expression in a basis": header(
        "options", "target_modules", to=ENDLESS, where=MAKES_LAYERS, message="expression.*Save the basis again"
    ),
    "ranks of a basis by expression": header(
        "options", "rank_pattern", to={ENDLESS: 2}, where=MAKES_LAYERS, message="expression.*Save the basis again"
    ),
    "an unknown option of a basis": header("options", "rank_budget", to=28, where=MAKES_LAYERS, message="rank_budget"),
    "another key in a header": file(HEADER, lambda c: c.replace(b"scales", b"scalez"), "", kind="basis", refuse=BASIS),
    "a cut header": file(HEADER, lambda _: b"{", "is damaged", kind="basis", refuse=BASIS),
    "a flipped bit of factors": file(FACTORS, flipped, "is damaged", kind="basis", refuse=BASIS),
    "no factors": Case("basis", lambda folder: (folder / FACTORS).unlink(), BASIS),
}  # fmt: skip


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("case", CASES)
def test_every_function_refuses_every_crafted_folder_in_one_line(case: str, made: Path, tmp_path: Path) -> None:
    kind, craft, must_refuse, message = CASES[case]
    source = made / "cores" / "basis" if kind == "basis" else made / kind
    folder = Path(shutil.copytree(source, tmp_path / "crafted"))
    craft(folder)
    functions = ways_into_a_basis() if kind == "basis" else ways_in(made)
    for name, read in functions.items():
        started = time.process_time()
        try:
            read(folder)
        except FrozenCoreError as error:
            refusal = str(error)
            assert len(refusal.splitlines()) <= 1, name
            assert len(refusal) < 1000, name
            if name in must_refuse - NOT_OF.get(kind, set()):
                assert re.search(message, refusal), (name, refusal)
        except Exception:
            assert name not in must_refuse, name  # PEFT's own error for what it reads before us
        else:
            assert name not in must_refuse, name
        assert time.process_time() - started < 20, name
    assert not (folder / "opened").exists()


def test_every_function_takes_the_sound_folders_that_are_its_own(made: Path) -> None:
    for kind, others in NOT_OF.items():
        for name, read in ways_in(made).items():
            if name not in others:
                read(made / kind)
    for read in ways_into_a_basis().values():
        read(made / "cores" / "basis")


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("case", ["a flipped bit", "a pickle", "truncated JSON", "a scale of 400 digits"])
def test_on_the_command_line_a_crafted_folder_is_one_line_and_an_earlier_export_stays(
    case: str, command: Callable[..., tuple[int, str, str]], made: Path, tmp_path: Path
) -> None:
    folder, out = Path(shutil.copytree(made / "adapter", tmp_path / "crafted")), tmp_path / "out"
    export = ["export", folder, "--base", made / "base", "--out", out, "--overwrite"]
    assert command(*export)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    CASES[case].craft(folder)
    for words in (["inspect", folder], export, [*export, "--to", "merged"]):
        status, _, errors = command(*words)
        assert (status, errors.count("\n"), errors[:12]) == (2, 1, "frozencore: ")
        assert re.search(CASES[case].message, errors)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
