"""Load the base model of a run, its tokenizer and its rows; find the layers to adapt."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as of_transformers

from frozencore.adapter.named_layers import is_end_of, linear_names
from frozencore.calibration.batches import Batch
from frozencore.device import computes_fast, memory_of, resolve_device
from frozencore.errors import ConfigError, ModelError
from frozencore.files.gguf_file import full_name
from frozencore.files.hub import safe_loading, why_unreadable
from frozencore.files.tokenizer import has_tokenizer, read_tokenizer, tokenizer_content, with_own_tokenizer
from frozencore.progress import Progress
from frozencore.text import num_of
from frozencore.tune.adapters import default_targets, targeted_layers
from frozencore.tune.config_parts import ModelConfig, RowsConfig, ScoringConfig
from frozencore.tune.locate import model_location
from frozencore.tune.methods import MethodConfig, Targets
from frozencore.tune.processes import num_started
from frozencore.tune.rows.conversations import LossOn
from frozencore.tune.rows.prompts import (
    PROTOCOL_MAX_LENGTH,
    PromptEncoder,
    PromptStyle,
    TooLong,
    context_limit,
    unknown_share,
)
from frozencore.tune.rows.row import TokenRow
from frozencore.tune.rows.token_batches import calibration_batches
from frozencore.tune.run_rows import RowCache, RunRows, prepare_rows

SHARE_OF_MEMORY = 0.5  # of the machine's, for the weights in float32
_WAY_OUT = "Give a folder that save_pretrained wrote, a GGUF file or a hub id."


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Turn off transformers' progress bars and warnings inside."""
    verbosity, draws_bars = of_transformers.get_verbosity(), of_transformers.is_progress_bar_enabled()
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        of_transformers.set_verbosity(verbosity)
        if draws_bars:
            of_transformers.enable_progress_bar()


def load_model(name: str, *, dtype: str = "auto", device: str = "auto") -> tuple[PreTrainedModel, Any]:
    """Load a causal language model in evaluation mode and its tokenizer.

    Args:
        name: Hub id, local folder, GGUF file, ``pocket`` or ``smollm2``. Local files are read without the network.
        dtype: ``auto`` is the dtype that the model was saved in, bfloat16 for quantised GGUF files; or float32 on a CPU
            that does not compute in that dtype itself, if its memory holds float32.
        device: ``auto`` is the first GPU, or the CPU; of several processes, each one's own.

    Raises:
        ModelError: There is no such model, it cannot be reached or read, or it is not a causal language model.
        ConfigError: There is no such device, or several processes would share one GPU.
    """
    if num_started() > 1 and ":" in device:
        raise ConfigError(
            f"Each of several processes has a GPU of its own, but --device {device} was given for "
            f"{num_started()}. Use cuda."
        )
    place = resolve_device(device)
    refusal = "cannot be read as a causal language model with its tokenizer"
    tokenizer, model = _loaded(name, lambda loading: (read_tokenizer(loading), _weights(loading, dtype)), refusal)
    model.name_or_path = model.config.name_or_path = full_name(model_location(name))  # a GGUF file, not its folder
    model = model.to(place).eval()
    is_quantised = getattr(model, "is_quantized", False)
    if dtype == "auto" and not is_quantised and run_dtype(model.dtype, model.num_parameters(), place) != model.dtype:
        model = model.float()
    _require_causal(model, name)
    return model, tokenizer


def run_dtype(saved: torch.dtype, num_parameters: int, place: torch.device) -> torch.dtype:
    """The dtype of ``auto``: float32 on a CPU that is slow in the saved one and has the memory; else the saved one."""
    fits = torch.float32.itemsize * num_parameters <= SHARE_OF_MEMORY * memory_of(place)
    return torch.float32 if fits and not computes_fast(saved, place) else saved


def dtype_in_words(model: PreTrainedModel, dtype: str) -> str | None:
    """Say if ``auto`` chose another dtype than the saved one, or one that this CPU computes slowly; else None."""
    saved = getattr(model.config, "dtype", None)
    if dtype != "auto" or not isinstance(saved, torch.dtype) or computes_fast(saved, model.device):
        return None
    name = str(saved).removeprefix("torch.")
    if model.dtype == torch.float32:
        return f"float32, because this CPU computes {name} slowly (--dtype {name} takes half the memory)"
    return f"{name} is about eight times as slow on this CPU as float32, which its memory does not hold"


def _require_causal(model: PreTrainedModel, name: str) -> None:
    """Refuse a model whose logits depend on later tokens: transformers loads some encoders as causal models too."""
    last = model.config.get_text_config().vocab_size - 1
    ids = torch.tensor([[last, last - 1, last], [last, last - 1, last - 1]], device=model.device)
    if last < 1 or getattr(model, "is_quantized", False):  # one row's rounding may depend on another's
        return
    try:
        with torch.inference_mode(), quiet_loading():
            first, second = (model(input_ids=row, attention_mask=torch.ones_like(row)).logits for row in ids.split(1))
    except Exception:  # the run's own passes will say what a model does not take
        return
    first, second = first[0, :-1].float(), second[0, :-1].float()
    tolerance = 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.05
    if (first - second).abs().max() > tolerance * first.abs().max():
        raise ModelError(
            f"--model {name} is no causal language model: its logits depend on later tokens ({type(model).__name__}). "
            "Give a model that reads from left to right."
        )


def load_config(name: str) -> PretrainedConfig:
    """Load only the configuration of a model.

    Raises:
        ModelError: As in :func:`load_model`.
    """
    return _loaded(name, lambda loading: AutoConfig.from_pretrained(**loading), "has no configuration", way_out="")


def load_tokenizer(name: str) -> Any:
    """Load only the tokenizer of a model.

    Raises:
        ModelError: As in :func:`load_model`.
    """
    return _loaded(name, read_tokenizer, "cannot be read as a tokenizer")


def tokenizer_of(adapter: Path | None, name: str, tokenizer: Any) -> Any:
    """The tokenizer and chat template that a trainer saved beside an adapter; else those of its base model.

    The longest text stays that of the base model: a trainer may write the length of its own rows there.

    Args:
        name, tokenizer: The base model, and its tokenizer.

    Raises:
        ModelError: It cannot be read.
    """
    if adapter is None or not has_tokenizer(adapter):
        return tokenizer
    loading = with_own_tokenizer(adapter, safe_loading(model_location(name)))
    try:
        with quiet_loading():
            own = read_tokenizer(loading)
    except Exception as error:  # transformers raises many kinds for files that are no tokenizer
        why = why_unreadable(loading, error)
        raise ModelError(
            f"The tokenizer beside the adapter in {adapter} cannot be read: {why} Save it again."
        ) from error
    own.model_max_length = tokenizer.model_max_length
    return own


def tokenizers_of(adapters: Mapping[str, Path | None], name: str, tokenizer: Any) -> dict[str, Any]:
    """The tokenizer of each adapter, see :func:`tokenizer_of`: one object for all that have the same files."""
    by_content: dict[frozenset[tuple[str, bytes]], Any] = {}
    found: dict[str, Any] = {}
    for adapter, folder in adapters.items():
        content = frozenset(() if folder is None else tokenizer_content(folder).items())
        if content not in by_content:
            by_content[content] = tokenizer_of(folder, name, tokenizer)
        found[adapter] = by_content[content]
    return found


def _loaded(name: str, load: Callable[[dict[str, Any]], Any], refusal: str, way_out: str = f" {_WAY_OUT}") -> Any:
    """Find a model and load a part of it; any error becomes one line."""
    name = model_location(name)
    with quiet_loading():
        loading = safe_loading(name)
        try:
            return load(loading)
        except Exception as error:  # transformers raises many kinds for a folder that is no model
            raise ModelError(f"--model {name} {refusal}: {why_unreadable(loading, error)}{way_out}") from error


def _weights(loading: dict[str, Any], dtype: str) -> PreTrainedModel:
    beside = {"local_files_only": loading["local_files_only"]}  # transformers searches for an adapter there
    kind = saved_class(AutoConfig.from_pretrained(**loading)) or AutoModelForCausalLM
    model: PreTrainedModel = kind.from_pretrained(dtype=dtype, adapter_kwargs=beside, **loading)
    return model


def saved_class(config: PretrainedConfig) -> Any:
    """The saved class of a language model with parts for images or sound; None for other models.

    For some of them ``AutoModelForCausalLM`` loads the language model alone, whose layers have other names than in the
    class that exports and serving engines load.
    """
    named = getattr(transformers, (config.architectures or [""])[0], None)
    is_whole = type(config) in AutoModelForCausalLM._model_mapping and config.get_text_config() is not config
    return named if is_whole and getattr(named, "config_class", None) is type(config) else None


def without_weights(config: PretrainedConfig) -> nn.Module:
    """A model on the meta device, in the class in which :func:`load_model` loads it."""
    kind = saved_class(config)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    return model


LOOKED_AT, MOST_UNKNOWN = 200, 0.25  # rows; text that a model has read has 1 to 11 % single letters, other text 30 %
_BLOCK = re.compile(r"\.(\d+)\.")


def resolve_targets(config: MethodConfig, model: PreTrainedModel) -> Targets:
    """The layers to adapt: the configured ones, or the method's default, mostly the attention projections.

    Raises:
        ConfigError: A name matches no layer, the architecture is unknown and no names were given, or the model has
            fewer blocks than requested.
    """
    targets = config.target_modules or default_targets(config.entry, model)
    if targets != "all-linear":
        _require_each(model, targets)
    return targets if config.layers is None else _in_last_blocks(model, targets, config.layers)


def _in_last_blocks(model: PreTrainedModel, targets: Targets, num_blocks: int) -> tuple[str, ...]:
    """The full names of the layers in the last blocks; the first number in a layer's name is its block."""
    block_of = {name: int(found[1]) for name in targeted_layers(model, targets) if (found := _BLOCK.search(name))}
    there = 1 + max(block_of.values(), default=-1)
    if num_blocks > there:
        raise ConfigError(f"--layers {num_blocks} is more than the {num_of(there, 'block')} of this model.")
    return tuple(name for name, block in block_of.items() if block >= there - num_blocks)


def _require_each(model: nn.Module, targets: Sequence[str]) -> None:
    """Refuse a name that matches no layer; otherwise a typo among several names would not be noticed."""
    present = {name for name, _ in model.named_modules()}
    for target in targets:
        if not any(is_end_of(target, name) for name in present):
            raise ConfigError(
                f"--targets {target!r} matches no layer of this model. Its linear layers are called "
                f"{', '.join(linear_names(model))}; or use all-linear."
            )


@dataclass(frozen=True)
class Base:
    """A loaded base model and its tokenizer, for any number of successive runs."""

    model: PreTrainedModel
    tokenizer: Any


@dataclass(frozen=True)
class Inputs:
    """A loaded model with the rows of one run.

    Attributes:
        calibration_batch: Rows in a batch of the calibration.
    """

    model: PreTrainedModel
    encoder: PromptEncoder
    rows: RunRows
    calibration_batch: int

    def calibration_batches(self) -> list[Batch]:
        """The calibration rows in batches of similar length."""
        return calibration_batches(self.rows.calibration, self.encoder.pad_id, self.calibration_batch)


def load(config: ModelConfig) -> Base:
    """Load the configured model with its tokenizer."""
    return Base(*load_model(config.name, dtype=config.dtype, device=config.device))


def prepare(
    model: ModelConfig,
    rows: RowsConfig,
    scoring: ScoringConfig,
    progress: Progress,
    base: Base | None = None,
    *,
    row_cache: RowCache | None = None,
) -> Inputs:
    """Load the model and the rows of a run. Errors in the input are raised here, before anything is written.

    Args:
        base: The configured model, loaded before.
        row_cache: The rows that earlier runs have read and tokenised.
    """
    progress("load", 0, None, model.name)
    base = base or load(model)
    encoder = make_encoder(
        base, style=rows.prompt_style, max_length=rows.max_length, too_long=rows.too_long, loss_on=rows.loss_on
    )
    read = prepare_rows(rows, scoring, encoder, row_cache)
    require_embedded(base.model, base.tokenizer, (*read.train, *read.held_out, *read.calibration))
    _require_known(base.tokenizer, read.train)
    has_limit = context_limit(base.model, base.tokenizer) < sys.maxsize
    unknown = unknown_share(base.tokenizer, read.train[:LOOKED_AT])
    notes = (
        dtype_in_words(base.model, model.dtype),
        None if has_limit else "the model states no longest context",
        f"{unknown:.0%} of the letters are tokens of their own: this tokenizer hardly knows the text"
        if unknown > MOST_UNKNOWN
        else None,
    )
    progress("load", 1, 1, "; ".join([read.in_words, *filter(None, notes)]))
    return Inputs(base.model, encoder, read, rows.calibration_batch)


def make_encoder(
    base: Base,
    *,
    style: PromptStyle,
    max_length: int | None,
    too_long: TooLong,
    loss_on: LossOn = "last",
    default_length: int = PROTOCOL_MAX_LENGTH,
) -> PromptEncoder:
    """Make the encoder of rows for a model; see :class:`PromptEncoder`.

    Args:
        max_length: None is ``default_length``, or the model's context if that is less.

    Raises:
        ConfigError: The rows would be longer than the model's context.
    """
    limit = context_limit(base.model, base.tokenizer)
    if max_length is not None and max_length > limit:
        raise ConfigError(f"--max-length {max_length} is beyond the model's context of {limit} tokens.")
    max_length = max_length or min(default_length, limit)
    return PromptEncoder(base.tokenizer, style=style, max_length=max_length, too_long=too_long, loss_on=loss_on)


def _require_known(tokenizer: Any, rows: Iterable[TokenRow]) -> None:
    """Refuse rows of which a tokenizer knows no word, such as rows in an alphabet that it was not made for."""
    if {token for row in rows for token in row.input_ids} <= set(tokenizer.all_special_ids):
        raise ModelError(
            "The model's tokenizer knows no word of the rows: all their tokens are special or unknown ones. Give rows "
            "in its alphabet, or the tokenizer that belongs to them."
        )


def require_embedded(model: Any, tokenizer: Any, rows: Iterable[TokenRow]) -> None:
    """Raise a ``ModelError`` for a token of rows that the model has no embedding of."""
    require_embeddings(model, tokenizer, (ids for row in rows for ids in row.token_lists))


def require_embeddings(model: Any, tokenizer: Any, texts: Iterable[list[int]]) -> None:
    """Raise a ``ModelError`` for a token of tokenised texts that the model has no embedding of."""
    size = model.get_input_embeddings().weight.shape[0]
    largest = max((max(ids, default=0) for ids in texts), default=0)
    if largest >= size:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise ModelError(
            f"A text holds the token {token!r} ({largest}), but the model has embeddings of {size} tokens only. Use "
            "the model's own tokenizer, or add the embeddings first (resize_token_embeddings)."
        )
