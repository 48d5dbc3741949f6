"""Train many tenants together: each step's batches hold the next rows of every tenant in a slot.

Tenants do not affect one another: each tenant's rows use its own core, its loss is the mean over its own tokens, and
clipping, learning rate and moments belong to its slot. The result is the same as training alone, except for rounding. A
tenant that ends, stops early or diverges gives its slot to the next.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from frozencore.calibration.preserve import own_random_state, plain_passes
from frozencore.errors import ConfigError, TrainingError
from frozencore.files.fingerprint import fingerprint_options, fingerprint_tensors
from frozencore.files.whole_file import whole_file
from frozencore.text import Progress, one_line
from frozencore.tune.many.slots import TrainedSlots
from frozencore.tune.many.tenant import ActiveTenants, Tenant, TenantState, Trained
from frozencore.tune.scoring.forward import base_of
from frozencore.tune.training import STEPS_VERSION
from frozencore.tune.training.checkpoints import (
    TENANT_STATES,
    Stop,
    checkpoints,
    defer_stop,
    explain_disk_errors,
    seal_checkpoint,
    starting_point,
    step_of,
)
from frozencore.tune.training.train import TrainingReport
from frozencore.tune.training.trainer import own_use_cache

SLOTS = 64
CHECKPOINT_S = 60.0
VALUES, ENDED = "values.safetensors", "ended"
NUM_KEPT = 2  # the newest may be incomplete

OnEnd = Callable[[Mapping[str, Trained]], None]


def train_many(
    model: nn.Module,
    tenants: Mapping[str, Tenant],
    *,
    pad_id: int,
    adapter_name: str = "default",
    num_slots: int = SLOTS,
    tokens_per_batch: int | None = None,
    checkpoint_dir: Path | None = None,
    checkpoint_s: float = CHECKPOINT_S,
    checkpoint_steps: int | None = None,
    resume: bool = False,
    identity: Mapping[str, Any] | None = None,
    on_end: OnEnd | None = None,
    progress: Progress | None = None,
) -> dict[str, Trained]:
    """Train a core for each tenant on the basis of one adapter.

    Every tenant starts from a copy of the adapter's core; the adapter's own core does not change.
    The model is left in evaluation mode; the global random state is restored. With ``checkpoint_dir``, SIGTERM and
    Ctrl-C take effect at the end of the current step, after its checkpoint; a second Ctrl-C takes effect at once.

    Args:
        num_slots: Tenants that train at once, those with the most steps first. A slot takes ``16·Σr²`` bytes and
            ``4·Σr²`` for the gradient.
        tokens_per_batch: Tokens of one forward pass; None fills the device.
        checkpoint_dir, resume, identity: See :func:`frozencore.tune.training.train.train`.
        checkpoint_s: Seconds between checkpoints.
        checkpoint_steps: Write a checkpoint after so many common steps at the latest.
        on_end: Called with the tenants that ended in a step. After a kill it may get the same tenant again.

    Returns:
        The result of each tenant, in the order of ``tenants``. A tenant that diverged is marked and does not stop
        others.

    Raises:
        ConfigError: No adapter of that name, no basis, or the adapter trains more than cores.
        TrainingError: A checkpoint cannot be written, or the folder holds checkpoints that are not resumed or of
            another training.
    """
    if num_slots < 1:
        raise ConfigError(f"Tenants train in at least one slot, got {num_slots}.")
    if not tenants:
        return {}
    if any(isinstance(module, AuxiliaryTrainingWrapper) for module in model.modules()):
        raise ConfigError(
            "Tenants share all but their cores, so an adapter with modules_to_save or trainable_token_indices "
            "trains alone: leave these out of its configuration."
        )
    slots = TrainedSlots(model, min(num_slots, len(tenants)), adapter_name=adapter_name)
    active = ActiveTenants(model, tenants, slots, pad_id=pad_id, tokens_per_batch=tokens_per_batch)
    identity = {**(identity or {}), **identity_of(tenants, slots)}
    resumed_from = starting_point(checkpoint_dir, resume, identity)
    ended: dict[str, Trained] = {}

    def take(new: dict[str, Trained]) -> None:
        ended.update(new)
        if new and on_end is not None:
            on_end(new)

    with ExitStack() as restored:
        stop = restored.enter_context(defer_stop()) if checkpoint_dir else Stop()
        restored.enter_context(own_random_state())
        restored.enter_context(plain_passes(model))
        restored.enter_context(own_use_cache(model))
        base_of(model).config.use_cache = False
        restored.callback(model.eval)
        model.train()
        kept = Checkpoints(checkpoint_dir, identity) if checkpoint_dir else None
        if kept is not None and resumed_from is not None:
            take(kept.read(resumed_from, active))
        elif kept is not None:  # tenants that end before the next checkpoint belong to this training
            with explain_disk_errors(checkpoint_dir):
                kept.write(active)
        saved, steps = time.perf_counter(), 0
        while active.fill():
            steps += 1
            new = {state.name: _trained(slots, state, values, resumed_from) for state, values in active.step()}
            is_last = stop()
            with explain_disk_errors(checkpoint_dir):
                if kept is not None:
                    kept.write_ended(new)
                    is_over = not active.states and not active.waiting
                    is_due = time.perf_counter() - saved >= checkpoint_s or steps == checkpoint_steps
                    if is_over or is_last or is_due:
                        kept.write(active)
                        saved, steps = time.perf_counter(), 0
                        done, total, _ = _progress_of(active, tenants, len(ended))
                        stop.saved = f"{done} of {total} steps of all are saved"
            take(new)
            if progress is not None:
                progress("train", *_progress_of(active, tenants, len(ended)))
            if is_last:
                break
    if len(ended) < len(tenants):  # a stop signal came, and its own handler did not end the process
        raise TrainingError(
            f"Training was told to stop with {len(ended)} of {len(tenants)} tenants at their end. "
            "Its checkpoint is whole: resume it."
        )
    return {name: ended[name] for name in tenants}


def _trained(slots: TrainedSlots, state: TenantState, values: Tensor, resumed_from: Path | None) -> Trained:
    report = replace(state.report(resumed_from), state_held_bytes=slots.state_held_bytes)
    return Trained(slots.by_layer(values.cpu()), report, state.diverged)


def _progress_of(active: ActiveTenants, tenants: Mapping[str, Tenant], num_ended: int) -> tuple[int, int, str]:
    """Steps done and total steps of all tenants, and a text with the losses."""
    to_do = {name: tenants[name].num_steps for name in active.waiting}
    to_do |= {state.name: state.tenant.num_steps - state.step for state in active.states}
    total = sum(tenant.num_steps for tenant in tenants.values())
    note = f"{num_ended} of {len(tenants)} have ended"
    if losses := [state.losses[-1] for state in active.states if state.losses]:
        note += f", {len(active.states)} train at loss {sum(losses) / len(losses):.3f}"
    return total - sum(to_do.values()), total, note


def identity_of(tenants: Mapping[str, Tenant], slots: TrainedSlots) -> dict[str, Any]:
    """The values that a checkpoint must share with the training that resumes it, as JSON values by name."""
    return {
        **STEPS_VERSION,
        "tenants": fingerprint_options({name: _content(tenant) for name, tenant in tenants.items()}),
        "slots": len(slots),
        "basis": fingerprint_tensors(_basis(slots)),
        "first core": fingerprint_tensors([("start", slots.start)]),
    }


def _basis(slots: TrainedSlots) -> Iterator[tuple[str, Tensor]]:
    """P, Q and the scale of each layer."""
    for name, layer in slots.layers.items():
        P, Q, _ = layer.factors(slots.adapter_name)
        yield from ((f"{name}.P", P), (f"{name}.Q", Q))
        yield f"{name}.scale", torch.tensor(layer.frozencore_scale[slots.adapter_name])


def _content(tenant: Tenant) -> dict[str, Any]:
    chosen = tenant.validation
    return {
        "recipe": tenant.recipe.content(),
        "rows": [row.trained_on for row in tenant.rows],
        "validation": None if chosen is None else [row.trained_on for row in chosen.rows],
        "scored": None if chosen is None else [chosen.every, chosen.patience],
    }


class Checkpoints:
    """The checkpoints of one training: a sealed folder with every slot, and a file for each finished tenant.

    A tenant's file is written once, when it ends. The folders ``checkpoint-N`` hold the tenants still training; the two
    newest are kept. After a kill, tenants that ended since the newest checkpoint train again. They must reach the same
    values, so a resumed training must form the same batches.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any]) -> None:
        self.out, self.identity = out, identity

    def write(self, active: ActiveTenants) -> None:
        """Write a checkpoint atomically, and remove older ones."""
        folder = self.out / f"checkpoint-{active.num_steps}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        states = active.states
        tensors = {name: held[: len(states)].cpu() for name, held in active.slots.state().items()}
        tensors |= {f"best.{i}": state.best.cpu() for i, state in enumerate(states) if state.best is not None}
        save_file(tensors, folder / VALUES)
        content = {"seats": [state.to_json() for state in states], "waiting": active.waiting}
        (folder / TENANT_STATES).write_text(json.dumps(content))
        seal_checkpoint(folder, self.identity)
        for old in checkpoints(self.out)[:-NUM_KEPT]:
            shutil.rmtree(old)

    def read(self, folder: Path, active: ActiveTenants) -> dict[str, Trained]:
        """Restore the training tenants from a checkpoint, and return the tenants that had ended."""
        content, tensors = json.loads((folder / TENANT_STATES).read_text()), load_file(folder / VALUES)
        active.states, active.waiting, active.num_steps = [], content["waiting"], step_of(folder)
        for i, state in enumerate(content["seats"]):
            best = tensors.get(f"best.{i}")
            tenant = active.tenants[state["name"]]
            active.states.append(
                TenantState.from_json(state, tenant, None if best is None else best.to(active.slots.device))
            )
        for name, held in active.slots.state().items():
            held[: len(active.states)].copy_(tensors[name])
        under_way = {state.name for state in active.states} | set(active.waiting)
        return {name: self._read_ended(name, folder) for name in active.tenants if name not in under_way}

    def write_ended(self, ended: Mapping[str, Trained]) -> None:
        """Store the results of finished tenants, each atomically."""
        for name, trained in ended.items():
            said = {"report": asdict(replace(trained.report, resumed_from=None)), "diverged": trained.diverged}
            cores = {layer: core.contiguous() for layer, core in trained.cores.items()}
            with whole_file(self._file(name)) as aside:
                save_file(cores, aside, metadata={"said": json.dumps(said)})

    def _read_ended(self, name: str, resumed_from: Path) -> Trained:
        file = self._file(name)
        try:
            with safe_open(file, framework="pt") as opened:
                said = json.loads(opened.metadata()["said"])
            report = TypeAdapter(TrainingReport).validate_python(said["report"])
            return Trained(load_file(file), replace(report, resumed_from=resumed_from), said["diverged"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise TrainingError(
                f"The tenant {name!r} had ended, but {file} is damaged ({one_line(error, 120)}). Remove {self.out} and "
                "train again."
            ) from error

    def _file(self, name: str) -> Path:
        """The file of a finished tenant; a hash stands for its name, which may have any characters."""
        return self.out / ENDED / f"{fingerprint_options({'tenant': name})[:32]}.safetensors"
