"""benchmarks/house: a tiny model on a little of the corpus learns, resumes bit-equal, and is saved to be used."""

from __future__ import annotations

import json
import lzma
import sys
from itertools import count, islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from places import ROOT, SHARED

HOUSE, CORPUS = ROOT / "benchmarks" / "house", SHARED / "corpus"
HEAD_SIZES = {32, 64, 80, 96, 128}  # what the attention kernels of serving engines are built for
TINY = {
    "vocabulary": 320, "hidden": 64, "intermediate": 128, "layers": 1, "heads": 2, "key_value_heads": 1, "rows": 16,
    "length": 16, "passes": 0.4, "rate": 1e-2, "every": 170, "held_out_rows": 32,
}  # fmt: skip

pytestmark = pytest.mark.skipif(not CORPUS.is_dir(), reason="needs ../shared/corpus")


@pytest.fixture(scope="module")
def pretrain() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOUSE))
        before = set(sys.modules)
        import pretrain

        yield pretrain
        for name in set(sys.modules) - before:
            if str(HOUSE) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 300 KB of the corpus, its README with the licences."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, num_documents in (("train-00.jsonl.xz", 60), ("valid.jsonl.xz", 5)):
        with lzma.open(CORPUS / name, "rt", encoding="utf-8") as all_lines:
            lines = list(islice(all_lines, num_documents))
        with lzma.open(folder / name, "wt", encoding="utf-8", preset=0) as some:
            some.writelines(lines)
    (folder / "README.md").write_text((CORPUS / "README.md").read_text())
    return folder


def run_main(pretrain: ModuleType, corpus: Path, out: Path, *more: str) -> None:
    options = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ["pretrain.py", "--corpus", str(corpus), "--out", str(out), "--device", "cpu", "--minutes", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*words, *options, *more])
        pretrain.main()


@pytest.fixture(scope="module")
def trained(pretrain: ModuleType, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("house")
    run_main(pretrain, corpus, out)
    return out


def history(out: Path) -> list[dict[str, Any]]:
    """Without what is of the clock."""
    entries = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    return [{k: v for k, v in entry.items() if k not in ("elapsed_s", "tokens_per_s")} for entry in entries]


def test_the_held_out_loss_falls_below_the_entropy_of_its_tokens(trained: Path) -> None:
    """The best that can be done by knowing how frequent each token of the held-out text is, and no more."""
    counts = np.bincount(np.fromfile(trained / "tokens" / "valid.bin", dtype=np.uint16))
    shares = counts[counts > 0] / counts.sum()
    first, *_, last = history(trained)
    assert first["held_out_loss"] > np.log(TINY["vocabulary"]) - 0.5
    assert last["held_out_loss"] < -(shares * np.log(shares)).sum() - 0.2


def test_the_spread_is_that_of_the_inputs_and_output_errors(pretrain: ModuleType, trained: Path) -> None:
    """Once more with hooks of our own, on the checkpoint's weights."""
    saved = torch.load(trained / "checkpoint.pt", weights_only=True)
    model = pretrain.new_model(pretrain.Recipe(**saved["recipe"]))
    model.load_state_dict(saved["model"])
    tokens = torch.from_numpy(np.fromfile(trained / "tokens" / "valid.bin", dtype=np.uint16).astype(np.int64))
    ids = pretrain.held_out_rows(tokens.numpy().astype(np.uint16), TINY["held_out_rows"], TINY["length"])
    layer, seen = model.get_submodule("model.layers.0.mlp.down_proj"), {}
    layer.register_forward_hook(lambda _, args, out: seen.update(inputs=args[0].detach(), outputs=out))
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    (errors,) = torch.autograd.grad(loss, seen["outputs"])
    found = history(trained)[-1]["spread"]["layers.0.mlp.down_proj"]
    for name, values in (("inputs", seen["inputs"]), ("errors", errors)):
        square = values.double().square().flatten(0, 1).mean(0)
        assert found[name] == pytest.approx(float(square.max() / square.median()), rel=0.01, abs=1e-3)


@pytest.mark.slow
def test_a_run_that_was_stopped_resumes_bit_equal(
    pretrain: ModuleType, corpus: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(run: Any, path: Path) -> None:
        save(run, path)
        if run.step:
            raise KeyboardInterrupt

    save = pretrain.Run.save
    monkeypatch.setattr(pretrain.Run, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_main(pretrain, corpus, tmp_path)
    monkeypatch.undo()
    assert 0 < history(tmp_path)[-1]["step"] < history(trained)[-1]["step"]
    with pytest.raises(SystemExit, match="--resume"):
        run_main(pretrain, corpus, tmp_path)
    with pytest.raises(SystemExit, match="seed 0"):
        run_main(pretrain, corpus, tmp_path, "--resume", "--seed", "1")
    run_main(pretrain, corpus, tmp_path, "--resume")
    assert history(tmp_path) == history(trained)
    ends = [torch.load(out / "checkpoint.pt", weights_only=True)["model"] for out in (tmp_path, trained)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])


def test_the_saved_folder_loads_as_any_other_model(corpus: Path, trained: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    saved = torch.load(trained / "checkpoint.pt", weights_only=True)["model"]
    assert model.dtype == torch.bfloat16
    assert all(torch.equal(value, saved[name].bfloat16()) for name, value in model.state_dict().items())
    with lzma.open(corpus / "valid.jsonl.xz", "rt", encoding="utf-8") as lines:
        text = json.loads(next(lines))["text"]
    ids = tokenizer(text).input_ids
    packed = np.fromfile(trained / "tokens" / "valid.bin", dtype=np.uint16)
    assert [*ids, tokenizer.eos_token_id] == packed[: len(ids) + 1].tolist()
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == model.config.vocab_size
    card = (trained / "model" / "README.md").read_text()
    assert all(
        licence in card for licence in ("CC BY 4.0", "OpenStax, Rice University", "CC BY-SA 4.0", "BSD-3-Clause")
    )


@pytest.mark.parametrize("readme", [None, "", "# Text\n\n## Cleaning\nNone.\n"])
def test_text_whose_licences_are_unknown_is_not_read(pretrain: ModuleType, tmp_path: Path, readme: str | None) -> None:
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    with pytest.raises(SystemExit, match="licences"):
        run_main(pretrain, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_cosine_ends_with_the_time(
    pretrain: ModuleType, corpus: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second for many passes: without the time in it, the cosine would still be near 1.

    On a clock of ours, which moves by 5 ms whenever it is read.
    """
    ticks = count()
    monkeypatch.setattr(pretrain, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 200))
    text = pretrain.packed_text(corpus, trained / "tokens", vocabulary=TINY["vocabulary"])
    recipe = pretrain.Recipe(**TINY | {"passes": 100.0, "every": 100_000})
    run = pretrain.Run.new(recipe, torch.device("cpu"))
    pretrain.train(run, text, trained / "in-time", seconds=1.0)
    _, last = history(trained / "in-time")
    assert 1.0 <= run.elapsed_s < 1.1
    assert 100 < last["step"] == run.step <= 200
    assert last["rate"] < 0.25 * recipe.rate * min(1.0, run.step / pretrain.WARM_UP)


def test_rows_of_a_pass_do_not_overlap_and_depend_on_the_step_alone(pretrain: ModuleType) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    rows = pretrain.Rows(tokens, num_rows=4, length=16, seed=0)
    passes = [
        torch.cat([rows.batch(step) for step in range(start, start + rows.steps_per_pass)])
        for start in (0, rows.steps_per_pass)
    ]
    for seen in passes:
        assert len(seen.unique()) == seen.numel() == rows.steps_per_pass * 64
        assert (seen.diff(dim=1) == 1).all()
    assert not torch.equal(*passes)
    assert torch.equal(rows.batch(3), pretrain.Rows(tokens, 4, 16, 0).batch(3))


def test_the_default_is_of_the_size_and_shape_that_was_asked_for(pretrain: ModuleType) -> None:
    recipe = pretrain.Recipe()
    with torch.device("meta"):
        model = pretrain.new_model(recipe)
    assert 12e6 <= pretrain.num_parameters(model) <= 15e6
    assert 2 * pretrain.num_parameters(model) <= 30e6
    assert recipe.hidden // recipe.heads in HEAD_SIZES
    assert model.config.model_type == "qwen2"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert recipe.passes >= 10
