"""Score one base model, or several adapters on it, over many tasks.

OUT/<subject>/<task>/predictions.jsonl    the prediction for every scored row
OUT/result.json                           all scores, written last

A subject is an adapter by a short name, or ``base``. The base model is loaded once and not changed."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any
from unicodedata import normalize

from peft import PeftConfig, PeftModel, PeftModelForCausalLM
from torch import Tensor, nn

from frozencore.adapter import core
from frozencore.adapter.config import FrozenCoreConfig
from frozencore.adapter.folders import read_tensors
from frozencore.adapter.layer import UncalibratedWarning
from frozencore.adapter.low_rank_adapter import changes_base
from frozencore.errors import ArtifactError, ConfigError, FrozenCoreError
from frozencore.files.atomic_write import require_writable, write_json, write_lines
from frozencore.files.fingerprint import fingerprint_model, fingerprint_tensors
from frozencore.files.names import ADAPTER
from frozencore.progress import Progress, as_stage
from frozencore.text import num_of, one_line
from frozencore.tune.config_parts import RowsConfig
from frozencore.tune.folder import PREDICTIONS, RECORD, locked, record_of_run, require_new
from frozencore.tune.load import Base, load_model, make_encoder, require_embedded, tokenizers_of
from frozencore.tune.provenance import Provenance
from frozencore.tune.record import EvaluationRecord, Hashes, ReadRows, Resolved, TaskResult, TunedRecord
from frozencore.tune.rows.prompts import PromptEncoder, PromptStyle, TooLong
from frozencore.tune.rows.row_sources import named
from frozencore.tune.rows.sources import find_source, is_named
from frozencore.tune.run_rows import USER_ROWS, UserData, fingerprint_rows
from frozencore.tune.scoring.forward import unload_adapter
from frozencore.tune.scoring.score import ScoredRows, score_rows

BASE = "base"


class BaseWithAdapter:
    """A base model with at most one adapter at a time: frozen cores, LoRA, or another PEFT method."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self._adapted: PeftModel | None = None
        self._folder: Path | None = None
        self._own_weights: dict[str, Tensor] = {}  # those of the base model that loading the adapter replaced

    def without_adapter(self) -> nn.Module:
        if self._adapted is not None:
            self.base, self._adapted, self._folder = unload_adapter(self._adapted), None, None
            self.base.load_state_dict(self._own_weights, strict=False)
        return self.base

    def with_adapter(self, folder: Path | None) -> nn.Module:
        """The base model with the adapter saved in a folder, in evaluation mode; None gives the base model alone.

        Raises:
            ArtifactError: There is no adapter, it is damaged or a pickle, or it does not fit this base.
        """
        if folder is None:
            return self.without_adapter()
        if self._adapted is not None and self._folder == folder:
            return self._adapted.eval()
        tensors = read_tensors(folder)  # refuses a damaged file and a pickle
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # missing tensors raise an error below
                warnings.simplefilter("always", UncalibratedWarning)
                base = self.without_adapter()
                config = PeftConfig.from_pretrained(str(folder))
                named = {key.removeprefix(core.BASE).replace(".base_layer.", ".") for key in tensors}
                if changes_base(vars(config)):
                    named |= {f"{key.partition('.lora_')[0]}.weight" for key in named}
                # no state dict: bitsandbytes rewrites an evaluated 4-bit weight when it makes one
                state = dict(chain(base.named_parameters(), base.named_buffers()))
                self._own_weights = {name: state[name].detach().clone() for name in named & state.keys()}
                if isinstance(config, FrozenCoreConfig):  # a local frozen core is checked as a whole first
                    config = FrozenCoreConfig.from_pretrained(str(folder))
                config.inference_mode = True
                if config.is_prompt_learning:  # it shifts every position
                    raise ArtifactError(
                        f"it has virtual tokens ({config.peft_type}), which are not scored here. Give an adapter that "
                        "changes layers."
                    )
                self._adapted = PeftModelForCausalLM(base, config)
                loaded = self._adapted.load_adapter(str(folder), adapter_name="default")
        except Exception as error:  # PEFT and safetensors raise many kinds of errors for a folder that does not fit
            reason = one_line(error, 400)
            raise ArtifactError(f"The adapter {folder} does not go on this base model: {reason}") from error
        odd = [*loaded.missing_keys, *loaded.unexpected_keys]
        if odd:
            raise ArtifactError(
                f"The adapter {folder} must fit this base model tensor by tensor, but {len(loaded.missing_keys)} are "
                f"missing and {len(loaded.unexpected_keys)} have no layer, for instance {odd[0]}. "
                f"Give the base model that it was trained on."
            )
        self._folder = folder
        return self._adapted.eval()


def adapter_names(folders: list[Path]) -> list[str]:
    """A short unique name for each adapter folder, from the last parts of its path.

    ``runs/a/adapter`` and ``runs/b/adapter`` become ``a`` and ``b``. No name equals the base model's.

    Raises:
        ArtifactError: A folder comes twice, or two differ only in upper and lower case.
    """
    whole = [Path(os.path.abspath(folder)).parts for folder in folders]  # resolves `..` but not links
    parts = [[part for part in path if part != ADAPTER] or [ADAPTER] for path in whole]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = [normalize("NFC", "-".join(path[-length:]).strip("/")) for path in parts]
        if len({BASE, *map(str.casefold, names)}) == len(names) + 1:  # some file systems ignore case
            return names
    if not folders:
        return []
    raise ArtifactError("Two adapters are the same folder, or their names differ in case only. Give each once.")


@dataclass(frozen=True)
class Evaluation:
    """The model, adapters, tasks and options of an evaluation.

    Attributes:
        data: Sources of rows, as for ``frozencore tune --data``; ``columns`` names the columns of files, and
            ``skip_bad`` leaves out rows without them.
        failed: Names of tasks that cannot be scored, with the reason; each is a row of the record.
        adapters: Folders of saved adapters. Without any, or with ``with_base``, the base model is scored.
        prompt_style: None is the style that the run of each adapter used, and ``auto`` for the base model.
        max_length: The most tokens of a prompt with its answer; None is the model's context.
        num_evaluation: Rows of each task; None is the task's default.
    """

    model: str
    data: tuple[str, ...] = ()
    columns: str | None = None
    skip_bad: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)
    adapters: tuple[Path, ...] = ()
    with_base: bool = False
    data_root: Path | None = None
    prompt_style: PromptStyle | None = None
    max_length: int | None = None
    too_long: TooLong = "refuse"
    length_normalised: bool = False
    num_evaluation: int | None = None
    dtype: str = "auto"
    device: str = "auto"


def evaluate_adapters(evaluation: Evaluation, out: Path, progress: Progress) -> EvaluationRecord:
    """Score every subject on every task and write ``out``.

    All rows are read and all adapters loaded before the first score. Then a task that cannot be scored is a row with
    its reason, and the others go on.

    Raises:
        FrozenCoreError: The model or an adapter cannot be loaded, ``out`` holds another evaluation or another process
            uses it, or no task could be scored; the message is then the first reason.
    """
    require_writable(out)
    with locked(out):
        require_new(out, RECORD)
        return _evaluate(evaluation, out, progress)


def _evaluate(evaluation: Evaluation, out: Path, progress: Progress) -> EvaluationRecord:
    names = adapter_names(list(evaluation.adapters))
    subjects: dict[str, Path | None] = {BASE: None} if evaluation.with_base or not names else {}
    subjects |= zip(names, evaluation.adapters, strict=True)
    progress("load", 0, None, evaluation.model)
    base = Base(*load_model(evaluation.model, dtype=evaluation.dtype, device=evaluation.device))
    encoders = _encoders(evaluation, base, subjects)
    different = {id(encoder): encoder for encoder in encoders.values()}
    read = {key: list(_read(evaluation, encoder, base.model)) for key, encoder in different.items()}
    _remove_begun(out, {(subject, one.name) for subject in subjects for tasks in read.values() for one in tasks})
    adapted = BaseWithAdapter(base.model)
    for folder in subjects.values():
        adapted.with_adapter(folder)
    reading = next((one.reading for tasks in read.values() for one in tasks if one.reading is not None), None)
    num_tasks = num_of(sum(isinstance(one.rows, ScoredRows) for one in next(iter(read.values()))), "task")
    progress("load", 1, 1, ", ".join([num_tasks, *(reading.not_as_given if reading else ())]))

    scores, failures = list[TaskResult](), list[FrozenCoreError]()
    for subject, folder in subjects.items():
        encoder = encoders[subject]
        for one in read[id(encoder)]:
            rows = one.rows
            try:
                if isinstance(rows, FrozenCoreError):
                    raise rows
                score = score_rows(
                    adapted.with_adapter(folder), encoder, rows, length_normalised=evaluation.length_normalised,
                    progress=as_stage(progress, f"{subject}: {one.name}"),
                )  # fmt: skip
            except FrozenCoreError as error:
                failures.append(error)
                scores.append(TaskResult(subject=subject, task=one.name, failure=str(error)))
                continue
            scores.append(
                TaskResult(
                    subject=subject, task=one.name, num_examples=len(rows.tokens),
                    rows=one.fingerprint, score=score.task, held_out_loss=score.held_out_loss,
                )
            )  # fmt: skip
            write_lines(out / subject / one.name / PREDICTIONS, map(asdict, score.predictions))
    if len(failures) == len(scores):
        raise failures[0]
    record = EvaluationRecord(
        format=1,
        model=evaluation.model,
        adapters={subject: str(folder) for subject, folder in subjects.items() if folder is not None},
        adapter_tensors={
            subject: fingerprint_tensors(sorted(read_tensors(folder).items()))
            for subject, folder in subjects.items()
            if folder is not None
        },
        prompt_styles={subject: "chat" if encoder.is_chat else "plain" for subject, encoder in encoders.items()},
        dtype=str(base.model.dtype),
        max_length=encoder.max_length,
        too_long=evaluation.too_long,
        length_normalised=evaluation.length_normalised,
        scores=tuple(scores),
        reading=reading,
        hashes=Hashes(model=fingerprint_model(adapted.without_adapter())),
        provenance=Provenance.here(next(base.model.parameters()).device),
    )
    write_json(out / RECORD, record.content())
    return record


def _encoders(evaluation: Evaluation, base: Base, subjects: Mapping[str, Path | None]) -> dict[str, PromptEncoder]:
    """The encoder of each subject's rows: one for all subjects with the same tokenizer and style."""
    encoders: dict[tuple[int, bool], PromptEncoder] = {}
    found: dict[str, PromptEncoder] = {}
    for subject, tokenizer in tokenizers_of(subjects, evaluation.model, base.tokenizer).items():
        encoder = make_encoder(
            Base(base.model, tokenizer), style=evaluation.prompt_style or style_of(subjects[subject]),
            max_length=evaluation.max_length, too_long=evaluation.too_long, default_length=sys.maxsize,
        )  # fmt: skip
        found[subject] = encoders.setdefault((id(tokenizer), encoder.is_chat), encoder)
    return found


def _remove_begun(out: Path, names: Collection[tuple[str, str]]) -> None:
    """Remove the predictions that an interrupted evaluation of these subjects and tasks has left.

    Raises:
        ArtifactError: There are predictions of other subjects or tasks.
    """
    left = list(out.glob(f"*/*/{PREDICTIONS}"))
    for file in left:
        if (file.parts[-3], file.parts[-2]) not in names:
            raise ArtifactError(
                f"A folder takes one evaluation, but {out} holds {file.relative_to(out)} of another one, which did not "
                "end. Choose another --out, or remove that folder."
            )
    for file in left:
        file.unlink()


@dataclass(frozen=True)
class TaskRows:
    """The rows of one source, or the error that prevents its score.

    Attributes:
        reading: A summary of reading the user's rows.
    """

    name: str
    rows: ScoredRows | FrozenCoreError
    reading: ReadRows | None = None

    @cached_property
    def fingerprint(self) -> str | None:
        return fingerprint_rows(self.rows.tokens) if isinstance(self.rows, ScoredRows) else None


def _read(evaluation: Evaluation, encoder: PromptEncoder, model: Any) -> Iterator[TaskRows]:
    """Read the rows of every source, in the style of one encoder."""
    for data in evaluation.data:
        name = find_source(data).name if is_named(data) else re.sub(r"[^\w.-]+", "-", named(data))  # a folder's name
        try:
            rows, reading = _rows_of(data, evaluation, encoder)
            require_embedded(model, encoder.tokenizer, rows.tokens)
            yield TaskRows(name, rows, reading)
        except FrozenCoreError as error:
            yield TaskRows(name, error)
    for name, reason in evaluation.failed.items():
        yield TaskRows(name, ConfigError(reason))


def _rows_of(data: str, evaluation: Evaluation, encoder: PromptEncoder) -> tuple[ScoredRows, ReadRows | None]:
    """The rows of a source, and what was read of a file."""
    if is_named(data):
        source = find_source(data)
        rows = source.draw_evaluation(evaluation.data_root, num_evaluation=evaluation.num_evaluation)
        return ScoredRows(source.name, source.scoring, encoder.encode(rows), source.max_new_tokens), None
    config = RowsConfig(data=data, columns=evaluation.columns, skip_bad=evaluation.skip_bad)
    files = UserData.read(config, encoder, most_rows=evaluation.num_evaluation)
    (file,) = files.files
    return ScoredRows(USER_ROWS, files.scoring(file.rows), file.rows), files.reading(file.left_out, file.rows)


def settings_of(adapter: Path | None) -> Resolved | None:
    """The settings of an adapter's run, among them its prompt style; None without a record, and for the base model."""
    record = None if adapter is None else record_of_run(adapter)
    return record.resolved if isinstance(record, TunedRecord) else None


def style_of(adapter: Path | None) -> PromptStyle:
    """The prompt style of an adapter's run; ``auto`` without a record."""
    settings = settings_of(adapter)
    return "auto" if settings is None else settings.prompt_style
