"""Moments of a loss of one's own, of images, sound, sentence embeddings and rewards, against autograd's gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid, normalize
from transformers import (
    ASTConfig,
    ASTForAudioClassification,
    BertConfig,
    BertModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForSequenceClassification,
)

from adapted import BATCHES, adapted
from frozencore import CalibrationOptions, FrozenCoreConfig, calibrate, collect_moments, get_bases
from frozencore.errors import CalibrationError, ConfigError, DataError
from frozencore.maths.capture import CAPTURE_NEEDS
from tiny import batch_of, draw_examples, tiny_qwen2

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LossFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class Case:
    """A model, batches of it, its loss (None: its own), adapted layers, and what they see of the batches."""

    model: nn.Module
    batches: list[Any]
    loss_fn: LossFn | None
    targets: tuple[str, ...]
    num_tokens: int


def made(kind: type[nn.Module], config: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def images() -> Case:
    model = made(ViTForImageClassification, ViTConfig(**SMALL, image_size=8, patch_size=4, num_labels=3))
    batches = [{"pixel_values": torch.randn(n, 3, 8, 8), "labels": torch.arange(n) % 3} for n in (4, 3)]
    return Case(model, batches, None, ("q_proj", "v_proj"), 7 * (1 + 4))


def images_as_pairs() -> Case:
    """Batches as torchvision's loaders give them."""
    plain = images()
    batches = [(batch["pixel_values"], batch["labels"]) for batch in plain.batches]
    return Case(
        plain.model, batches, lambda model, batch: cross_entropy(model(pixel_values=batch[0]).logits, batch[1]),
        plain.targets, plain.num_tokens,
    )  # fmt: skip


def spectrograms() -> Case:
    config = ASTConfig(
        **SMALL, patch_size=4, frequency_stride=4, time_stride=4, max_length=12, num_mel_bins=8, num_labels=3
    )
    batches = [{"input_values": torch.randn(n, 12, 8), "labels": torch.arange(n) % 3} for n in (2, 3)]
    return Case(made(ASTForAudioClassification, config), batches, None, ("q_proj", "v_proj"), 5 * (2 + 3 * 2))


def sound() -> Case:
    """The mask is of samples, the layers see frames."""
    config = Wav2Vec2Config(
        **SMALL, conv_dim=(8, 8), conv_kernel=(4, 4), conv_stride=(4, 4), num_feat_extract_layers=2, num_labels=3,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=8,
    )  # fmt: skip
    mask = torch.ones(3, 160, dtype=torch.long)
    mask[0, 96:] = 0
    batch = {"input_values": torch.randn(3, 160), "attention_mask": mask, "labels": torch.arange(3)}
    return Case(made(Wav2Vec2ForSequenceClassification, config), [batch], None, ("q_proj", "v_proj"), 3 * 10)


def sentences() -> Case:
    """Two towers of one model: each call has a mask of its own."""
    model = made(BertModel, BertConfig(**SMALL, vocab_size=40))

    def embedded(model: nn.Module, text: dict[str, Tensor]) -> Tensor:
        mask = text["attention_mask"]
        states = model(input_ids=text["input_ids"], attention_mask=mask).last_hidden_state
        return normalize((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)

    def contrastive(model: nn.Module, batch: dict[str, dict[str, Tensor]]) -> Tensor:
        scores = 5 * embedded(model, batch["anchor"]) @ embedded(model, batch["positive"]).T
        return cross_entropy(scores, torch.arange(len(scores)))

    sides = [batch_of(draw_examples(4, seed=seed, longest=longest)) for seed, longest in ((1, 6), (2, 9))]
    texts = [{name: side[name] for name in ("input_ids", "attention_mask")} for side in sides]
    shown = sum(int(text["attention_mask"].sum()) for text in texts)
    return Case(model, [dict(zip(("anchor", "positive"), texts, strict=True))], contrastive, ("query", "value"), shown)


def rewards() -> Case:
    config = Qwen2Config(
        **SMALL, vocab_size=40, num_key_value_heads=1, num_labels=1, pad_token_id=0, max_position_embeddings=64
    )

    def preference(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        chosen, rejected = (model(**batch[name]).logits for name in ("chosen", "rejected"))
        return -logsigmoid(chosen - rejected).mean()

    sides = [batch_of(draw_examples(3, seed=seed), padding_id=0) for seed in (1, 2)]
    texts = [{name: side[name] for name in ("input_ids", "attention_mask")} for side in sides]
    shown = sum(int(text["attention_mask"].sum()) for text in texts)
    batch = {"note": "pairs", **dict(zip(("chosen", "rejected"), texts, strict=True))}
    return Case(made(Qwen2ForSequenceClassification, config), [batch], preference, ("q_proj", "o_proj"), shown)


CASES = (images, images_as_pairs, spectrograms, sound, sentences, rewards)


@pytest.mark.parametrize("case_of", CASES)
def test_the_cross_moment_is_autograds_gradient_summed_over_examples(case_of: Callable[[], Case]) -> None:
    case = case_of()
    names = [name for name, _ in case.model.named_modules() if name.rsplit(".", 1)[-1] in case.targets]
    assert len(names) == 4
    found = collect_moments(case.model, case.batches, names, needs=CAPTURE_NEEDS, loss_fn=case.loss_fn)
    model = copy.deepcopy(case.model)
    for batch in case.batches:
        loss = model(**batch).loss if case.loss_fn is None else case.loss_fn(model, batch)
        (loss * rows_of(batch)).backward()
    for name, moments in found.items():
        expected = model.get_submodule(name).weight.grad
        assert moments.num_tokens == case.num_tokens
        torch.testing.assert_close(moments.cross, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def rows_of(batch: Any) -> int:
    parts = batch.values() if isinstance(batch, dict) else batch
    return next(len(part) if isinstance(part, Tensor) else rows_of(part) for part in parts if not isinstance(part, str))


@pytest.mark.parametrize("case_of", CASES)
def test_any_model_is_calibrated_and_its_cores_then_train(case_of: Callable[[], Case]) -> None:
    case = case_of()
    own = case.loss_fn or (lambda model, batch: model(**batch).loss)
    model = get_peft_model(case.model, FrozenCoreConfig(r=2, target_modules=list(case.targets)))
    calibrate(model, case.batches, loss_fn=case.loss_fn, progress=False)
    before = float(own(model, case.batches[0]))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        own(model, case.batches[0]).backward()
        optimizer.step()
    assert float(own(model, case.batches[0])) < before


def language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean over the examples of the mean over their completion tokens, as calibration has it by default."""
    logits, targets = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, :-1], batch["labels"][:, 1:]
    losses = cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=-100)
    return (losses.sum(1) / targets.ne(-100).sum(1)).mean()


@pytest.mark.parametrize("memory_budget", [None, "3MB"])
def test_the_own_loss_written_out_gives_the_bases_of_the_default(memory_budget: str | None) -> None:
    by_default, written_out = adapted("fcca", calibrated=False), adapted("fcca", calibrated=False)
    calibrate(by_default, BATCHES, progress=False, memory_budget=memory_budget)
    calibrate(written_out, BATCHES, loss_fn=language_loss, progress=False, memory_budget=memory_budget)
    one, other = get_bases(by_default), get_bases(written_out)
    for name, P in one.items():
        torch.testing.assert_close(P @ P.T, other[name] @ other[name].T, rtol=0, atol=1e-3)


class GivesADictionary(nn.Module):
    def __init__(self, model: nn.Module, *, without: str = "") -> None:
        super().__init__()
        self.model, self.without = model, without

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        return {name: value for name, value in output.items() if name != self.without}


def test_a_model_that_gives_a_dictionary_is_read_as_well() -> None:
    plain = collect_moments(
        tiny_qwen2(), BATCHES, ["model.layers.0.self_attn.q_proj"], loss_fn=lambda m, b: m(**b).loss
    )
    found = collect_moments(GivesADictionary(tiny_qwen2()), BATCHES, ["model.model.layers.0.self_attn.q_proj"])
    torch.testing.assert_close(*(next(iter(moments.values())).cross for moments in (plain, found)))
    with pytest.raises(CalibrationError, match=r"GivesADictionary gives no loss\. Say .* calibrate\(\.\.\., loss_fn="):
        collect_moments(
            GivesADictionary(tiny_qwen2(), without="loss"), BATCHES, ["model.model.layers.0.self_attn.q_proj"]
        )


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"loss_fn": lambda model, batch: model(**batch).logits}, CalibrationError, r"one number.*tensor of shape \("),
        ({"loss_fn": lambda *_: 0.5}, CalibrationError, "one number, .* but a float came"),
        ({"loss_fn": lambda *_: torch.tensor(0.5)}, CalibrationError, "loss does not depend on layer"),
        ({"options": CalibrationOptions(tokens="completion")}, ConfigError, "option tokens is about completion tokens"),
        ({"options": CalibrationOptions(weighting="token")}, ConfigError, "option weighting is about completion"),
        ({"data": [("a", 1)]}, DataError, "number 0 is tuple"),
    ],
)
def test_what_is_no_loss_is_refused_in_one_line(given: dict[str, Any], kind: type[Exception], message: str) -> None:
    model = adapted("fcca", calibrated=False)
    with pytest.raises(kind, match=message) as error:
        calibrate(model, **{"data": BATCHES, "loss_fn": language_loss, "progress": False, **given})
    assert "\n" not in str(error.value)


def test_a_constructor_that_reads_inputs_alone_takes_as_many_examples_as_it_is_told() -> None:
    case = images_as_pairs()
    model = get_peft_model(case.model, FrozenCoreConfig(r=2, constructor="eva", target_modules=["q_proj"]))
    found = calibrate(model, case.batches, num_examples=5, loss_fn=case.loss_fn, progress=False)
    assert {layer.num_tokens for layer in found.layers.values()} == {5 * (1 + 4)}
