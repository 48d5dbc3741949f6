"""Checkpoints of a training of many tenants: a sealed folder with every slot, and a file for each finished tenant.

A tenant's file is written once, when it ends. The folders ``checkpoint-N`` hold the tenants still training; the two
newest are kept. After a kill, tenants that ended since the newest checkpoint train again. They must reach the same
values, so a resumed training must form the same batches.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from frozencore.errors import TrainingError
from frozencore.files.fingerprint import fingerprint_options, fingerprint_tensors
from frozencore.files.whole_file import whole_file
from frozencore.tune.many.active_tenants import ActiveTenants
from frozencore.tune.many.slots import TrainedSlots
from frozencore.tune.many.tenant import Tenant, TenantState, Trained
from frozencore.tune.training import STEPS_VERSION
from frozencore.tune.training.checkpoints import TENANT_STATES, checkpoints, seal_checkpoint, step_of
from frozencore.tune.training.train import TrainingReport
from frozencore.words import one_line

VALUES, ENDED = "values.safetensors", "ended"
NUM_KEPT = 2  # the newest may be incomplete


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
    """The checkpoints of one training."""

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
