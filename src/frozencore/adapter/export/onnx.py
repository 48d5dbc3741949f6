"""A base model with a basis in it for ONNX Runtime, and the cores that it takes by request.

The model builder of onnxruntime-genai writes the graph, with its cache of keys and values. Each adapted layer
becomes ``y = Wx + s·P (R (Qᵀ x))``:

    model.onnx, model.onnx.data   the graph, and the base model's weights as the builder wrote them
    basis.onnx.data               Q (n x r) and s·Pᵀ (r x m) of each layer, float32
    model-web.onnx                the graph for onnxruntime-web, which feeds no input that has a default: a core is
                                  required, zeros for the base model

All R are one input, ``frozencore_core_<basis id>`` of shape tenants x Σr²: the vector of a core, as in an adapter's
file. Its default is one row of zeros, with which the model computes what the base model computes. One row serves all
rows of a batch; several rows serve one row of the batch each. An ``.onnx_adapter`` is that one tensor. ONNX Runtime
matches it by its name, so a core on another basis is refused before anything runs.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import torch

from frozencore.adapter.basis import require_same_id, require_set
from frozencore.adapter.core import CORE
from frozencore.adapter.export.base_model import base_name, load_base_model, save_tokenizer
from frozencore.adapter.export.basis_model import require_fits
from frozencore.adapter.export.lora import export_source
from frozencore.adapter.folders import read_basis
from frozencore.errors import ConfigError, ModelError
from frozencore.files.atomic_write import atomic_folder, atomic_write
from frozencore.files.hub import safe_loading
from frozencore.text import one_line

MODEL_FILE = "model.onnx"
PRECISIONS = {None: "fp32", 8: "int8", 4: "int4"}
DTYPES = (torch.float32, torch.float16)
BUILDER = """
import runpy
import onnxruntime_genai.models
from builders.base import Model
# the runtime's attention rotates heads of a multiple of 16 only; others are rotated before it
Model.is_fused_rope_supported = lambda self: self.head_size % 16 == 0
runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__")
"""


@dataclass(frozen=True)
class OnnxExport:
    """The ONNX model that was written.

    Attributes:
        core_input: The name of the input that takes a core.
        ranks: Ranks by layer name.
    """

    directory: Path
    core_input: str
    ranks: dict[str, int]


def export_onnx(
    directory: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    bits: int | None = None,
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
) -> OnnxExport:
    """Write the base model with a basis in it for ONNX Runtime on a CPU.

    Args:
        directory: A basis, or an adapter, whose core is left out.
        base: Folder, GGUF file or hub id of the base model; by default the one that the basis or adapter names.
        bits: 8 or 4 rounds the base weights, as the builder does it; by default they are float32.
        dtype: The dtype of the input that takes a core, and so of ``.onnx_adapter`` files: float32 or float16.

    Raises:
        ArtifactError: The basis is damaged or of another base model, or ``out`` exists.
        ConfigError: No base model is named, ``bits`` or ``dtype`` is another one, or the extra ``onnx`` is missing.
        CalibrationError: There is no basis yet.
        ModelError: The base model cannot be read, is quantised, or the builder does not know it.
    """
    if bits not in PRECISIONS:
        raise ConfigError(f"Base weights in ONNX have 8 or 4 bits, or None for float32, but bits={bits!r} was given.")
    graph = _graph_module(dtype)
    directory, out = Path(directory), Path(out)
    basis = read_basis(directory)
    require_set(basis.layers)
    base = base_name(directory, base, basis.base_model)
    loading = safe_loading(base)
    with (
        atomic_folder(out, overwrite=overwrite, reads=[directory, basis.place, base]) as aside,
        TemporaryDirectory() as spare,
    ):
        model = load_base_model(base, "auto", loading, "the builder starts from plain weights")
        require_fits(basis, directory, model, base)
        place = Path(loading["pretrained_model_name_or_path"])
        if not place.is_dir():
            place = Path(spare, "base")
            model.save_pretrained(place)
            save_tokenizer(directory, place, loading)
        del model
        build_base(
            place, aside, PRECISIONS[bits], Path(spare), base, fused=any("qkv_proj" in name for name in basis.layers)
        )
        graph.add_basis(aside / MODEL_FILE, basis, dtype)
    return OnnxExport(out, f"{CORE}{basis.id}", basis.ranks)


def export_onnx_adapter(
    directory: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """Write the core of an adapter as an ``.onnx_adapter`` file.

    Args:
        directory: The adapter's folder; its core may have fewer bits.
        model: Folder that :func:`export_onnx` wrote, to check that its basis is the adapter's.
        dtype: As for :func:`export_onnx`; by default that of ``model``, or float32.

    Returns:
        The bytes of the file.

    Raises:
        ArtifactError: The adapter is damaged, or the model has another basis.
        ConfigError: The adapter trains more than its cores, ``dtype`` is neither float32 nor float16, ``model`` takes
            cores of another dtype, or the extra ``onnx`` is missing.
    """
    graph = _graph_module(dtype or torch.float32)
    adapter = export_source(directory)
    if model is not None:
        basis_id, of_core = graph.input_of_cores(Path(model, MODEL_FILE))
        require_same_id(str(directory), adapter.basis_id, f"the model {model} has", basis_id)
        if dtype not in (None, of_core):
            raise ConfigError(f"The model {model} takes cores of {of_core}, but {dtype} was given. Leave --dtype out.")
        dtype = of_core
    with atomic_write(Path(out)) as aside:
        graph.write_onnx_adapter(adapter.core, aside, dtype or torch.float32)
    return Path(out).stat().st_size


def _graph_module(dtype: torch.dtype) -> ModuleType:
    """:mod:`frozencore.adapter.export.onnx_graph`, which imports the packages of the extra ``onnx``."""
    if dtype not in DTYPES:
        raise ConfigError(f"ONNX Runtime takes a core in float32 or float16, but {dtype} was given.")
    if find_spec("onnxruntime_genai") is None or find_spec("onnx") is None:
        raise ConfigError(
            "To write for ONNX Runtime takes the packages onnxruntime-genai and onnx, which are not installed: "
            "pip install 'frozencore[onnx]'."
        )
    from frozencore.adapter.export import onnx_graph

    return onnx_graph


def build_base(place: Path, out: Path, precision: str, spare: Path, base: str, *, fused: bool) -> None:
    """Write the base model as ONNX; q, k and v stay apart unless the model has them as one layer."""
    command = [sys.executable, "-c", BUILDER, "-i", str(place.absolute()), "-o", str(out.absolute()), "-p", precision]
    command += ["-e", "cpu", "-c", str(spare), "--extra_options", f"fuse_qkv={str(fused).lower()}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode or not (out / MODEL_FILE).is_file():
        lines = done.stderr.strip().splitlines() or ["without a message"]
        raise ModelError(
            f"The model builder of onnxruntime-genai cannot write {base}: {one_line(lines[-1], 200)} "
            "Merge or export a LoRA instead, for another engine."
        )
