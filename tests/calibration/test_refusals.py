"""What calibration refuses, in one line that names the batch, the layer or the option; nothing is calibrated then."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification

from frozencore import CalibrationOptions, calibrate, collect_moments
from frozencore.errors import CalibrationError, ConfigError, DataError, FrozenCoreError
from tiny import BATCHES, EXAMPLES, Example, Stream, adapted, attention_names, batch_of, batches_of, tiny_qwen2

Refusal = tuple[Callable[[], object], type[FrozenCoreError], str]
Q, O_PROJ = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.o_proj"
ROWS = [{"input_ids": list(e.ids), "labels": [-100] * e.num_prompt + list(e.ids[e.num_prompt :])} for e in EXAMPLES]

# -------------------------------------------------------------------------------------------------------- options

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tokens": "all"}, "tokens must be one of nonpad, completion, nonzero_delta, but 'all' was given"),
    ({"weighting": "sum"}, "weighting must be one of"),
    ({"skip_first": -1}, "skip_first must be a whole number of at least 0, but -1 was given"),
    ({"group_size": 0}, "group_size must be a whole number of at least 1, but 0 was given"),
    ({"stats_device": 3}, "stats_device must be text or none, but 3 was given"),
]  # fmt: skip


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=str)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CalibrationOptions(**options)


# ----------------------------------------------------------------------------------------- batches, layers, moments


def collected(
    batches: Any = None, *, model: nn.Module | None = None, layers: list[str] | None = None, **options: Any
) -> Callable[[], object]:
    given = {name: options.pop(name) for name in ("needs", "loss_fn") if name in options}
    return lambda: collect_moments(
        tiny_qwen2() if model is None else model,
        [batch_of(EXAMPLES)] if batches is None else batches,
        attention_names(tiny_qwen2()) if layers is None else layers,
        options=CalibrationOptions(**options),
        **given,
    )


def changed(change: Callable[[nn.Module], object]) -> nn.Module:
    model = tiny_qwen2()
    with torch.no_grad():
        change(model)
    return model


def nan_in_a_weight() -> nn.Module:
    return changed(lambda model: model.model.layers[1].self_attn.k_proj.weight[0, 0].fill_(torch.nan))


def nan_for_a_token() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    calm = [Example(tuple(min(token, 38) for token in e.ids), e.num_prompt) for e in EXAMPLES]
    batches = batches_of(calm, 2)
    batches[2]["input_ids"][0, 1] = 39
    return changed(lambda model: model.model.embed_tokens.weight[39].fill_(torch.nan)), batches


def infinite_error() -> nn.Module:
    """A backward hook of the user turns one gradient infinite in layer 0 only."""
    model = tiny_qwen2()
    model.model.layers[0].self_attn.o_proj.register_full_backward_hook(
        lambda _, gradients, __: tuple(g if g is None else g * float("inf") for g in gradients)
    )
    return model


def with_unused() -> nn.Module:
    model = tiny_qwen2()
    model.unused = nn.Linear(3, 3)
    return model


def token_classifier() -> dict[str, Any]:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = BertForTokenClassification(BertConfig(vocab_size=40, num_labels=3, **sizes))
    batch = batch_of(EXAMPLES)
    labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"] % 3, -100)
    layers = ["bert.encoder.layer.0.attention.self.query"]
    return {"model": model, "batches": [{**batch, "labels": labels}], "layers": layers}


class GivesNoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_qwen2()

    def forward(self, **inputs: Tensor) -> dict[str, Any]:
        return {"logits": self.model(**inputs).logits}


MASKED = batch_of(EXAMPLES) | {"labels": torch.full_like(batch_of(EXAMPLES)["labels"], -100)}
UNLABELLED = {name: value for name, value in batch_of(EXAMPLES).items() if name != "labels"}
CROSS, OUTER = frozenset({"cross"}), frozenset({"input_outer"})
COLLECTING: list[Refusal] = [
    (collected([MASKED]), CalibrationError, "every label of a batch is masked"),
    *((collected([UNLABELLED], needs=needs, tokens=tokens), CalibrationError, "needs labels .*attention_mask")
      for needs, tokens in ((CROSS, "nonpad"), (OUTER, "completion"), (CROSS, "completion"))),
    (collected([]), CalibrationError, "no counted token. Check that there are batches"),
    (collected(iter([]), group_size=1), CalibrationError, "no counted token. Check that there are batches"),
    (collected(skip_first=50, needs=frozenset({"input_square"})), CalibrationError, "received no counted token"),
    *((collected(model=with_unused(), layers=[Q, "unused"], needs=needs, group_size=size), CalibrationError, "'unused'")
      for needs in (CROSS, OUTER) for size in (1, 999)),
    *((collected(batches_of(EXAMPLES, 3), model=nan_in_a_weight(), needs=needs),
       CalibrationError, f"'{O_PROJ}' in calibration batch 0")
      for needs in (CROSS, OUTER, CROSS | OUTER)),
    (lambda: collected(nan_for_a_token()[1], model=nan_for_a_token()[0], needs=OUTER)(),
     CalibrationError, f"'{Q}' in calibration batch 2"),
    (collected(model=infinite_error()), CalibrationError, "v_proj'.*batch 0"),
    *((collected(**token_classifier(), **options), ConfigError, "this BertForTokenClassification is no decoder-only")
      for options in ({"tokens": "completion"}, {"weighting": "token_sum"})),
    (collected(model=GivesNoLoss(), layers=[f"model.{Q}"]), CalibrationError, "GivesNoLoss.*loss_fn="),
]  # fmt: skip

# ------------------------------------------------------------------------------------------------ data and losses


def calibrated(data: Any = BATCHES, **options: Any) -> Callable[[], object]:
    return lambda: calibrate(NEW, data, progress=False, **options)


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


NEW = adapted("fcca", calibrated=False)
DATA: list[Refusal] = [
    (calibrated(Dataset.from_list(ROWS)), DataError, "a collator such as DataCollator"),
    (calibrated(Dataset.from_list([{"prompt": "a", "completion": "b"}])), DataError, "'prompt': str, 'completion'"),
    (calibrated([ROWS]), DataError, r"number 0 is a list of rows \('input_ids', 'labels'\)"),
    (calibrated([[{"prompt": "tom has"}]]), DataError, r"number 0 is a list of rows \('prompt'\)"),
    (calibrated(ROWS), DataError, "number 0 is 'input_ids': list, .*rows with a collator"),
    (calibrated(ROWS, num_examples=2), DataError, "number 0 is 'input_ids': list"),
    (calibrated([{key: value[0] for key, value in batch_of(EXAMPLES).items()}]), DataError, "number 0 is"),
    (calibrated([BATCHES[0], "b"]), DataError, "number 1 is str"),
    *((calibrated(data, collator=collator), DataError, f"a dictionary of '{name}'.* Pass \\[batch\\], or one split")
      for data, name in ((DatasetDict(train=Dataset.from_list(ROWS)), "train"), (batch_of(EXAMPLES), "input_ids"))
      for collator in (None, batch_of)),
    (calibrated(itertools.cycle(BATCHES)), ConfigError, "num_examples=128"),
    (calibrated(itertools.repeat(BATCHES[0])), ConfigError, "num_examples=128"),
    (calibrated(Stream(), collator=batch_of), ConfigError, "this Stream has no known end"),
    (calibrated(DataLoader(Stream())), ConfigError, "this DataLoader has no known end"),
    (calibrated(Dataset.from_list(ROWS).to_iterable_dataset(), collator=batch_of), ConfigError, "num_examples=128"),
    (calibrated(DataLoader(EXAMPLES, collate_fn=batch_of), collator=batch_of), ConfigError, "Leave the collator out"),
    (calibrated(ROWS, batch_size=2), ConfigError, "Pass a collator as well"),
    (calibrated([], collator=batch_of), CalibrationError, "no counted token. Check that there are batches"),
    (calibrated(loss_fn=lambda *_: torch.tensor(0.5)), CalibrationError, "no counted token.*its loss use this layer"),
    (calibrated(loss_fn=own_loss, options=CalibrationOptions(tokens="completion")), ConfigError, "option tokens"),
    (calibrated(loss_fn=own_loss, options=CalibrationOptions(weighting="token_sum")), ConfigError, "option weighting"),
    (calibrated([("a", 1)], loss_fn=own_loss), DataError, "number 0 is tuple"),
]  # fmt: skip

REFUSALS = [*COLLECTING, *DATA]


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(("call", "error", "message"), REFUSALS, ids=lambda value: value if type(value) is str else "")
def test_a_refusal_names_its_reason_and_calibrates_nothing(
    call: Callable[[], object], error: type[FrozenCoreError], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()
    assert not any(value.any() for name, value in NEW.named_buffers() if "frozencore_" in name)


def test_what_a_collator_says_of_tokenised_rows_is_not_ours_to_replace() -> None:
    def refuses(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        raise ValueError("the third label is beyond the vocabulary")

    with pytest.raises(ValueError, match=r"^the third label is beyond the vocabulary$") as caught:
        calibrated(Dataset.from_list(ROWS), collator=refuses)()
    assert not isinstance(caught.value, FrozenCoreError)
