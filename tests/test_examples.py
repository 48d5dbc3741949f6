"""Every file in examples/ runs as it stands, on tiny models; what it saves has learned and loads."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from fixtures import ROOT, SOURCES
from frozencore import FrozenCoreConfig, export_basis_model, save_basis
from frozencore.tune.pocket import pocket_model_path
from input_files import write_random_llama, write_rows
from serving import SETTINGS, environment_of
from tiny import cores_of, train_at_random

EXAMPLES = ROOT / "examples"
LINE = "\u2028"  # a line separator of Unicode, which ends no line of a JSONL file
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs an example on a model and data; the adapter that it saved."""

    def ran(name: str, model: Path, data: Path | Sequence[dict[str, Any]], *words: str) -> Path:
        if not isinstance(data, Path):
            write_rows(tmp_path / "rows.jsonl", data)
            data = tmp_path / "rows.jsonl"
        own = ["--model", str(model), "--data", str(data), "--output", str(tmp_path / "out"), "--rank", "4", *words]
        monkeypatch.setattr(sys, "argv", [name, *own])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return tmp_path / "out" / "adapter"

    return ran


def losses(adapter: Path) -> list[float]:
    """The state of the Trainer's newest checkpoint."""
    states = sorted((adapter.parent / "trainer").glob("checkpoint-*/trainer_state.json"))
    return [entry["loss"] for entry in json.loads(states[-1].read_text())["log_history"] if "loss" in entry]


def has_learned(base: nn.Module, adapter: Path) -> PeftModel:
    model = PeftModel.from_pretrained(base, adapter).eval()
    assert cores_of(model)
    assert all(bool(layer.core("default").any()) for layer in cores_of(model))
    return model


@torch.no_grad()
def next_token_shares(model: nn.Module, tokenizer: Any, prompt: str) -> torch.Tensor:
    """(vocabulary,): the probability of every token after a prompt."""
    return model(**tokenizer([prompt], return_tensors="pt", return_token_type_ids=False)).logits[0, -1].softmax(-1)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["base model", "trained adapter"])
def test_dpo_moves_the_chosen_above_the_rejected(start: str, run: Callable[..., Path], tmp_path: Path) -> None:
    rows = [{"prompt": f"Tom has {i} cats .", "chosen": " two cats", "rejected": " no dogs"} for i in range(32)]
    words: list[str] = []
    if start == "trained adapter":
        core = FrozenCoreConfig(r=4, constructor="random", task_type="CAUSAL_LM")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(pocket_model_path()), core)
        train_at_random(model, size=0.1)
        model.save_pretrained(tmp_path / "start")
        words = ["--adapter", str(tmp_path / "start"), "--learning-rate", "0.1"]
    adapter = run("dpo.py", pocket_model_path(), rows, *words)
    assert losses(adapter)[0] == pytest.approx(0.6931, abs=1e-3)  # ln 2: the reference is the policy
    assert losses(adapter)[-1] < 0.6
    has_learned(AutoModelForCausalLM.from_pretrained(pocket_model_path()), adapter)


@pytest.mark.slow
def test_grpo_makes_what_is_rewarded_likelier(run: Callable[..., Path]) -> None:
    prompt, answer = "Tom went to the", " garden"
    adapter = run(
        "grpo.py", pocket_model_path(), [{"prompt": prompt, "answer": answer}] * 64,
        "--steps", "12", "--max-new-tokens", "2",
    )  # fmt: skip
    model = has_learned(AutoModelForCausalLM.from_pretrained(pocket_model_path()), adapter)
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    (token,) = tokenizer(answer, add_special_tokens=False)["input_ids"]

    after = next_token_shares(model, tokenizer, prompt)[token]
    with model.disable_adapter():
        assert after > next_token_shares(model, tokenizer, prompt)[token]


@pytest.mark.slow
def test_grpo_with_vllm_sends_the_core_to_the_engine_at_every_step(tmp_path: Path) -> None:
    """In vLLM's environment, with the packages of this one behind its own."""
    python = environment_of("vllm") / "bin" / "python"
    folder, prompt = write_random_llama(tmp_path / "base"), "ĀāĂă"
    base, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        base.lm_head.weight *= 10  # so that some token is likely
    base.save_pretrained(folder)
    token = int(next_token_shares(base, tokenizer, prompt).argmax())
    core = FrozenCoreConfig(r=4, constructor="random", task_type="CAUSAL_LM")
    save_basis(get_peft_model(AutoModelForCausalLM.from_pretrained(folder), core), tmp_path / "basis")
    export_basis_model(tmp_path / "basis", tmp_path / "engine", base=folder)
    row = json.dumps({"prompt": prompt, "answer": tokenizer.decode([token])}) + "\n"
    (tmp_path / "rows.jsonl").write_text(row * 64)
    (tmp_path / "sitecustomize.py").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})")
    own = {
        "--model": folder, "--data": tmp_path / "rows.jsonl", "--basis": tmp_path / "basis", "--rank": 8,
        "--engine": tmp_path / "engine", "--output": tmp_path / "out", "--steps": 6, "--max-new-tokens": 2,
        "--max-length": 64, "--dtype": "float32", "--learning-rate": 0.1,
    }  # fmt: skip
    places = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCES}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [python, EXAMPLES / "grpo_vllm.py", *(str(word) for pair in own.items() for word in pair)],
        env=os.environ | SETTINGS | places, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "The core entered the engine 6 times" in ran.stdout
    model = has_learned(base, tmp_path / "out" / "adapter")
    after = next_token_shares(model, tokenizer, prompt)[token]
    with model.disable_adapter():
        assert after > next_token_shares(model, tokenizer, prompt)[token]


def test_texts_are_classified_by_a_core_under_a_new_head(run: Callable[..., Path]) -> None:
    rows = [
        {"text": f"it was {word} {i}", "label": label} for i in range(16) for label, word in enumerate(("bad", "good"))
    ]
    adapter = run("classification.py", pocket_model_path(), rows, "--epochs", "3")
    assert sum(losses(adapter)[-4:]) < 0.8 * sum(losses(adapter)[:4])
    base = AutoModelForSequenceClassification.from_pretrained(pocket_model_path(), num_labels=2)
    has_learned(base, adapter)


@pytest.mark.slow
def test_images_are_classified(run: Callable[..., Path], tmp_path: Path) -> None:
    from PIL import Image

    for name, colour in (("dark", 40), ("light", 200)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(16):
            Image.new("RGB", (8, 8), (colour + i, colour, colour - i)).save(tmp_path / "images" / name / f"{i}.png")
    torch.manual_seed(0)
    ViTForImageClassification(ViTConfig(**SMALL, image_size=8, patch_size=4)).save_pretrained(tmp_path / "vit")
    ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "vit")
    adapter = run("vision.py", tmp_path / "vit", tmp_path / "images", "--epochs", "5")
    assert sum(losses(adapter)[-4:]) < 0.8 * sum(losses(adapter)[:4])
    has_learned(AutoModelForImageClassification.from_pretrained(tmp_path / "vit", num_labels=2), adapter)


@pytest.mark.slow
def test_sentences_come_near_their_likes(run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": f"Tom has {i} cats .", "like": f"there are {i} cats"} for i in range(64)]
    adapter = run("embeddings.py", pocket_model_path(), rows, "--epochs", "3")
    said = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert said[-1] < said[0]
    has_learned(AutoModel.from_pretrained(pocket_model_path()), adapter)


@pytest.mark.slow
def test_an_encoder_and_its_decoder_learn_to_repeat(run: Callable[..., Path], tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
        decoder_start_token_id=tokenizer.pad_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    rows = [{"source": f"say {word}", "target": word} for word in ("one", "two", "red", "cat") for _ in range(8)]
    adapter = run("seq2seq.py", tmp_path / "t5", rows, "--epochs", "5")
    assert losses(adapter)[-1] < losses(adapter)[0]
    has_learned(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "t5"), adapter)


@pytest.mark.slow
def test_own_rows_are_learned_by_the_trainer(tmp_path: Path) -> None:
    """In a process of its own, since it starts a process group."""
    rows = [{"prompt": f"Tom has {i} cats .{LINE}", "completion": " two cats"} for i in range(16)]
    write_rows(tmp_path / "rows.jsonl", rows)
    own = [
        "--model",
        pocket_model_path(),
        "--data",
        tmp_path / "rows.jsonl",
        "--output",
        tmp_path / "out",
        "--rank",
        "4",
    ]
    done = subprocess.run([sys.executable, EXAMPLES / "finetune.py", *own], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    has_learned(AutoModelForCausalLM.from_pretrained(pocket_model_path()), tmp_path / "out" / "adapter")


def test_a_core_learns_from_private_rows_within_the_budget_that_it_prints(
    run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All 36 steps count, also those that draw no row: two of 24 rows are drawn on average."""
    accountants = pytest.importorskip("opacus.accountants")
    monkeypatch.setattr("secrets.randbits", lambda _: 7)  # the same rows and noise each time
    rows = [{"prompt": f"Tom has {i} cats .{LINE}", "completion": " two cats"} for i in range(24)]
    write_rows(tmp_path / "public.jsonl", rows[:4])
    own = {"--rows-a-step": "2", "--epochs": "3", "--epsilon": "8", "--public": str(tmp_path / "public.jsonl")}
    words = [word for pair in own.items() for word in pair]
    with pytest.raises(SystemExit, match="below one over the number of rows, 1/24, but 0.1 was given"):
        run("private.py", pocket_model_path(), rows, *words, "--delta", "0.1")
    adapter = run("private.py", pocket_model_path(), rows, *words, "--delta", "0.01")

    said = capsys.readouterr().out
    accountant = accountants.RDPAccountant()
    accountant.history = [(float(re.search(r"noise multiplier ([\d.]+)", said)[1]), 2 / 24, 36)]  # type: ignore[index]
    spent = [float(one) for one in re.findall(r"epsilon ([\d.]+) of 8 spent", said)]
    assert len(spent) == 3
    assert spent[-1] <= 8
    assert spent[-1] == pytest.approx(accountant.get_epsilon(0.01), rel=0.02)  # the multiplier has three digits
    model = has_learned(AutoModelForCausalLM.from_pretrained(pocket_model_path()), adapter)
    tokenizer = AutoTokenizer.from_pretrained(pocket_model_path())
    (token, *_) = tokenizer(" two", add_special_tokens=False)["input_ids"]
    after = next_token_shares(model, tokenizer, "Tom has 30 cats .")[token]
    with model.disable_adapter():
        assert after > 2 * next_token_shares(model, tokenizer, "Tom has 30 cats .")[token]


def test_no_step_is_taken_beyond_those_for_which_the_noise_was_chosen(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Opacus chose the noise for 230 steps here, ran 231, and spent 8.006 of 8."""
    pytest.importorskip("opacus")
    rows = [{"prompt": f"Tom has {i} cats .{LINE}", "completion": " two cats"} for i in range(77)]
    run("private.py", pocket_model_path(), rows, "--rows-a-step", "1", "--epochs", "3", "--epsilon", "8")
    assert max(float(one) for one in re.findall(r"epsilon ([\d.]+) of 8 spent", capsys.readouterr().out)) <= 8


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--epochs", "0"], "--epochs: must be 1 or more, but is 0"),
        (["--epsilon", "nan"], "--epsilon: must be a finite number above zero, but is nan"),
        (["--clip", "0"], "--clip: must be a finite number above zero, but is 0"),
        (["--max-length", "3"], "row 1 of .* has a prompt of"),
    ],
)
def test_options_that_would_train_on_nothing_or_spend_what_means_nothing_are_refused(
    words: list[str], rule: str, run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("opacus")
    rows = [{"prompt": f"Tom has cats .{LINE}", "completion": " two cats"}]
    with pytest.raises(SystemExit) as stopped:
        run("private.py", pocket_model_path(), rows, *words)
    assert re.search(rule, f"{capsys.readouterr().err}{stopped.value}")


FEDERATED = """
import sys
from pathlib import Path

import federated
from flwr.supercore.telemetry import FLWR_TELEMETRY_ENABLED
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file

from frozencore import frozen_core_layers

POCKET = sys.argv[1]
assert FLWR_TELEMETRY_ENABLED == "0"
model, tokenizer = federated.on_basis(POCKET, "basis")
zero = get_peft_model_state_dict(model)


def updates(cores):
    set_peft_model_state_dict(model, cores)
    factors = [layer.factors("default") for layer in frozen_core_layers(model, "default").values()]
    return [P @ R @ Q.T for P, Q, R in factors]


wanted, count = 0, 0
for file in sorted(Path("clients").glob("*.jsonl")):
    rows = federated.rows_of(file, tokenizer)
    set_peft_model_state_dict(model, zero)
    federated.train_locally(model, rows, tokenizer, rate=0.05, batch_size=4, seed=f"{file.stem} 1")
    own = updates(get_peft_model_state_dict(model))
    wanted, count = [len(rows) * X + (wanted[i] if count else 0) for i, X in enumerate(own)], count + len(rows)
average = updates(load_file("out/adapter/adapter_model.safetensors"))
error = max(float((X - Y / count).norm() / X.norm()) for X, Y in zip(average, wanted, strict=True))
assert error < 1e-6, error
"""


OTHER_BASIS = """
import sys
from pathlib import Path

import federated
from flwr.simulation import run_simulation

settings = {"clients": 3, "rounds": 1, "share": 1.0, "rate": 0.05, "batch_size": 4}
server = federated.server_app(sys.argv[1], "basis", Path("refused"), **settings)
engine = {"init_args": {"num_cpus": 1}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
run_simulation(server, federated.client_app(sys.argv[1], "other", Path("clients")), 3, backend_config=engine)
"""


@pytest.mark.slow
def test_flower_averages_cores_exactly_and_clients_on_another_basis_refuse(tmp_path: Path) -> None:
    """Against updates trained one after the other and averaged whole; clients have different numbers of rows."""
    python = environment_of("flower") / "bin" / "python"
    for seed, place in enumerate(("basis", "other")):
        base = AutoModelForCausalLM.from_pretrained(pocket_model_path())
        config = FrozenCoreConfig(r=8, constructor="random", seed=seed, task_type="CAUSAL_LM")
        save_basis(get_peft_model(base, config), tmp_path / place)
    (tmp_path / "clients").mkdir()
    for name, num_rows in (("anna", 4), ("ben", 8), ("eve", 12)):
        rows = [{"prompt": f"{name} has {i} cats .{LINE}", "completion": " two cats"} for i in range(num_rows)]
        write_rows(tmp_path / "clients" / f"{name}.jsonl", rows)
    own = ["--model", pocket_model_path(), "--basis", "basis", "--data", "clients", "--output", "out"]
    places = {**os.environ, "PYTHONPATH": f"{SOURCES}{os.pathsep}{EXAMPLES}"}

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, *words], cwd=tmp_path, env=places, capture_output=True, text=True, check=False)

    done = run(EXAMPLES / "federated.py", *own, "--rounds", "1", "--learning-rate", "0.05")
    assert done.returncode == 0, done.stderr[-2000:]
    sent = int(re.search(r"round 1: ([\d,]+) bytes", done.stdout)[1].replace(",", ""))  # type: ignore[index]
    model = has_learned(AutoModelForCausalLM.from_pretrained(pocket_model_path()), tmp_path / "out" / "adapter")
    assert 0 < sent - 4 * sum(layer.core("default").numel() for layer in cores_of(model)) < 256
    done = run("-c", FEDERATED, pocket_model_path())
    assert done.returncode == 0, done.stderr[-2000:]
    done = run("-c", OTHER_BASIS, pocket_model_path())
    said = done.stdout + done.stderr
    assert "A core works on its own basis only, but the server's is" in said, said[-2000:]
    assert "in one of them every client failed" in said, said[-2000:]
    assert done.returncode != 0
    assert not (tmp_path / "refused").exists()


def test_every_example_is_run_here() -> None:
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in Path(__file__).read_text()] == []


def test_examples_import_public_names_only() -> None:
    sources = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    notebook = json.loads((EXAMPLES / "first_hour.ipynb").read_text(encoding="utf-8"))
    sources["first_hour.ipynb"] = "\n".join("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code")
    for name, source in sources.items():
        imported = re.findall(r"^(?:from|import) (frozencore[\w.]*)", source, flags=re.MULTILINE)
        assert imported, name
        assert set(imported) == {"frozencore"}, name
