"""The public names of ``frozencore``. Importing them registers the method with PEFT."""

from __future__ import annotations

from frozencore.adapter.bank import CoreBank
from frozencore.adapter.basis import Basis, load_basis
from frozencore.adapter.calibrate import calibrate
from frozencore.adapter.card import write_model_card
from frozencore.adapter.config import FrozenCoreConfig, register_constructor
from frozencore.adapter.core import Core
from frozencore.adapter.export.basis_model import export_basis_model, export_tenant, tenant_weights
from frozencore.adapter.export.lora import export_lora
from frozencore.adapter.export.merged import export_merged
from frozencore.adapter.export.onnx import export_onnx, export_onnx_adapter
from frozencore.adapter.folders import merge_adapters
from frozencore.adapter.loaded_adapter import frozen_core_layers
from frozencore.adapter.loaded_basis import basis_id, get_basis, save_basis, set_basis
from frozencore.adapter.model import FrozenCoreModel
from frozencore.adapter.swap import get_core, prepare_swap, swap_core
from frozencore.calibration.calibrate import Calibration, build_bases
from frozencore.calibration.calibration_options import CalibrationOptions
from frozencore.calibration.collect import collect_moments
from frozencore.constructors import CONSTRUCTORS, BasisOptions, LayerData, build_basis
from frozencore.constructors.eva import eva_basis
from frozencore.constructors.fcca import fcca_basis, rawgrad_basis
from frozencore.constructors.filora import filora_basis
from frozencore.constructors.lora_xs import lora_xs_basis, milora_basis
from frozencore.constructors.random import random_basis, vera_basis
from frozencore.constructors.signgrad import signgrad_basis
from frozencore.errors import FrozenCoreError
from frozencore.maths.basis import LayerBasis
from frozencore.maths.moments import LayerMoments
from frozencore.maths.whitening import Whitening

__all__ = [
    "CONSTRUCTORS",
    "Basis",
    "BasisOptions",
    "Calibration",
    "CalibrationOptions",
    "Core",
    "CoreBank",
    "FrozenCoreConfig",
    "FrozenCoreError",
    "FrozenCoreModel",
    "LayerBasis",
    "LayerData",
    "LayerMoments",
    "Whitening",
    "basis_id",
    "build_bases",
    "build_basis",
    "calibrate",
    "collect_moments",
    "eva_basis",
    "export_basis_model",
    "export_lora",
    "export_merged",
    "export_onnx",
    "export_onnx_adapter",
    "export_tenant",
    "fcca_basis",
    "filora_basis",
    "frozen_core_layers",
    "get_basis",
    "get_core",
    "load_basis",
    "lora_xs_basis",
    "merge_adapters",
    "milora_basis",
    "prepare_swap",
    "random_basis",
    "rawgrad_basis",
    "register_constructor",
    "save_basis",
    "set_basis",
    "signgrad_basis",
    "swap_core",
    "tenant_weights",
    "vera_basis",
    "write_model_card",
]
