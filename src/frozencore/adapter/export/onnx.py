"""A base model with a basis in it for ONNX Runtime, and the cores that it takes by request.

The graph is what the model builder of onnxruntime-genai writes, with its cache of keys and values. Each adapted layer
becomes ``y = Wx + s·P (R (Qᵀ x))``:

    model.onnx, model.onnx.data   the graph, and the base model's weights as the builder wrote them
    basis.onnx.data               Q (n x r) and s·Pᵀ (r x m) of each layer, float32
    model-web.onnx                the graph for onnxruntime-web, which feeds no input that has a default: a core is
                                  required, zeros for the base model

All R are one input, ``frozencore_core_<basis id>`` of shape tenants x Σr²: the vector of a core, as in an adapter's
file. Its default is one row of zeros, with which the model computes what the base model computes. One row serves all
rows of a batch; several rows serve one row of the batch each. An ``.onnx_adapter`` holds that one tensor. ONNX Runtime
matches it by its name, so a core on another basis is refused before anything runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from frozencore.adapter.basis import Basis, require_same_id, require_set
from frozencore.adapter.core import CORE, Core
from frozencore.adapter.export.base_model import base_name, load_base_model, save_tokenizer
from frozencore.adapter.export.basis_model import require_fits
from frozencore.adapter.export.lora import export_source, in_dtype
from frozencore.adapter.folders import read_basis
from frozencore.errors import ArtifactError, ConfigError, ModelError
from frozencore.files.atomic_write import atomic_folder, atomic_write
from frozencore.files.hub import safe_loading
from frozencore.maths.basis import LayerBasis
from frozencore.text import one_line

MODEL_FILE, WEB_FILE, BASIS_FILE = "model.onnx", "model-web.onnx", "basis.onnx.data"
ENTRY = "frozencore_basis_id"
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
_LAYER = re.compile(r".*\blayers\.(\d+)\.(self_attn|mlp)\.(\w+)")
_IN_GRAPH = {"dense": "o_proj", "out_proj": "o_proj"}


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
        ConfigError: No base model is named, or the extra ``onnx`` is missing.
        CalibrationError: There is no basis yet.
        ModelError: The base model cannot be read, is quantised, or the builder does not know it.
    """
    _require(dtype)
    directory, out = Path(directory), Path(out)
    basis = read_basis(directory)
    require_set(basis.layers)
    base = base_name(directory, base, basis.base_model)
    loading = safe_loading(base)
    with atomic_folder(out, overwrite=overwrite, reads=directory) as aside, TemporaryDirectory() as spare:
        model = load_base_model(base, "auto", loading, "the builder starts from plain weights")
        require_fits(basis, directory, model, base)
        place = Path(loading["pretrained_model_name_or_path"])
        if "gguf_file" in loading or not place.is_dir():
            place = Path(spare, "base")
            model.save_pretrained(place)
            save_tokenizer(directory, place, loading)
        del model
        build_base(
            place, aside, PRECISIONS[bits], Path(spare), base, fused=any("qkv_proj" in name for name in basis.layers)
        )
        _add_basis(aside / MODEL_FILE, basis, dtype)
    return OnnxExport(out, f"{CORE}{basis.id}", basis.ranks)


def export_onnx_adapter(
    directory: str | Path,
    out: str | Path,
    *,
    model: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Write the core of an adapter as an ``.onnx_adapter`` file.

    Args:
        directory: The adapter's folder; its core may have fewer bits.
        model: Folder that :func:`export_onnx` wrote, to check that its basis is the adapter's.
        dtype: As for :func:`export_onnx`.

    Returns:
        The bytes of the file.

    Raises:
        ArtifactError: The adapter is damaged, or the model has another basis.
        ConfigError: The adapter trains more than its cores, or the extra ``onnx`` is missing.
    """
    _require(dtype)
    adapter = export_source(directory)
    if model is not None:
        require_same_id(str(directory), adapter.basis_id, f"the model {model} has", onnx_basis_id(Path(model)))
    with atomic_write(Path(out)) as aside:
        write_onnx_adapter(Core.of(adapter.basis_id, adapter.cores), aside, dtype)
    return Path(out).stat().st_size


def write_onnx_adapter(core: Core, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a core as the one tensor of an ``.onnx_adapter`` file."""
    import onnxruntime

    name = f"{CORE}{core.basis_id}"
    values = in_dtype(name, core.values.cpu(), dtype)
    file = onnxruntime.AdapterFormat()
    file.set_adapter_version(1)
    file.set_model_version(1)
    file.set_parameters({name: onnxruntime.OrtValue.ortvalue_from_numpy(values[None].numpy())})
    file.export_adapter(str(path))


def onnx_basis_id(folder: Path) -> str:
    """The id of the basis in a model that :func:`export_onnx` wrote."""
    import onnx

    path = folder / MODEL_FILE
    entries = {}
    if path.is_file():
        entries = {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    if ENTRY not in entries:
        raise ArtifactError(
            f"{folder} has no {MODEL_FILE} with a basis in it. Write one with frozencore export --to onnx."
        )
    return str(entries[ENTRY])


def _require(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"ONNX Runtime takes a core in float32 or float16, but {dtype} was given.")
    if find_spec("onnxruntime_genai") is None or find_spec("onnx") is None:
        raise ConfigError(
            "To write for ONNX Runtime takes the packages onnxruntime-genai and onnx, which are not installed: "
            "pip install 'frozencore[onnx]'."
        )


def build_base(place: Path, out: Path, precision: str, spare: Path, base: str, *, fused: bool) -> None:
    """Write the base model as ONNX; q, k and v stay apart unless the model has them as one layer."""
    command = [sys.executable, "-c", BUILDER, "-i", str(place.absolute()), "-o", str(out.absolute()), "-p", precision]
    command += ["-e", "cpu", "-c", str(spare), "--extra_options", f"fuse_qkv={str(fused).lower()}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode or not (out / MODEL_FILE).is_file():
        lines = done.stderr.strip().splitlines() or ["it says nothing"]
        raise ModelError(
            f"The model builder of onnxruntime-genai cannot write {base}: {one_line(lines[-1], 200)} "
            "Merge or export a LoRA instead, for another engine."
        )


def _add_basis(path: Path, basis: Basis, dtype: torch.dtype) -> None:
    """Put P, Q and the input of cores into a graph, and write its file again, and the one for the web."""
    import onnx
    from onnx import TensorProto, external_data_helper, helper, numpy_helper

    model = onnx.load(path, load_external_data=False)  # the base weights stay in their file
    graph, core = model.graph, f"{CORE}{basis.id}"
    size = sum(r * r for r in basis.ranks.values())
    kind = TensorProto.FLOAT16 if dtype == torch.float16 else TensorProto.FLOAT
    graph.input.append(helper.make_tensor_value_info(core, kind, ["tenants", size]))
    constants = {core: torch.zeros(1, size, dtype=dtype)}
    nodes = [helper.make_node("Cast", [core], ["basis/core"], to=TensorProto.FLOAT)]
    nodes += _split_core(basis.ranks, constants)
    graph.initializer.extend(numpy_helper.from_array(X.numpy(), name) for name, X in constants.items())
    outputs = {output_of(graph, name): name for name in basis.layers}
    inputs = {node.output[0]: node.input[0] for node in graph.node if node.input}
    for node in graph.node:
        nodes.append(node)
        if (name := outputs.get(node.output[0])) is not None:
            x = inputs[node.output[0].replace("/Add/", "/MatMul/")]
            nodes += _update(node, x, name, basis.layers[name])
    for name, own in basis.layers.items():
        for side, X in (("Q", own.Q), ("P", own.scale * own.P.double().mT)):
            tensor = numpy_helper.from_array(X.float().contiguous().numpy(), f"{name}/{side}")
            external_data_helper.set_external_data(tensor, BASIS_FILE)
            graph.initializer.append(tensor)
    del graph.node[:]
    graph.node.extend(nodes)
    model.metadata_props.append(onnx.StringStringEntryProto(key=ENTRY, value=basis.id))
    onnx.save(model, path)
    del graph.initializer[[tensor.name for tensor in graph.initializer].index(core)]
    onnx.save(model, path.with_name(WEB_FILE))


def _split_core(ranks: Mapping[str, int], constants: dict[str, torch.Tensor]) -> Iterator[Any]:
    """Nodes that cut a core's vector into each layer's R (tenants x r x r): one reshape for a run of equal ranks."""
    from onnx import helper

    runs = [(rank, list(names)) for rank, names in groupby(ranks, key=lambda name: ranks[name])]
    constants["basis/runs"] = torch.tensor([len(names) * rank * rank for rank, names in runs])
    parts = [f"basis/run/{i}" for i in range(len(runs))]
    yield helper.make_node("Split", ["basis/core", "basis/runs"], parts, axis=1)
    for part, (rank, names) in zip(parts, runs, strict=True):
        constants[f"{part}/shape"] = torch.tensor([-1, len(names) * rank, rank])
        constants[f"{part}/ranks"] = torch.tensor([rank] * len(names))
        yield helper.make_node("Reshape", [part, f"{part}/shape"], [f"{part}/R"])
        yield helper.make_node("Split", [f"{part}/R", f"{part}/ranks"], [f"{name}/R" for name in names], axis=1)


def output_of(graph: Any, name: str) -> str:
    """The name of a layer's output, with its bias, in the builder's graph."""
    found = _LAYER.fullmatch(name)
    if found is not None:
        index, block, last = found.groups()
        place = f"/model/layers.{index}/{'mlp' if block == 'mlp' else 'attn'}/{_IN_GRAPH.get(last, last)}"
        there = {node.output[0] for node in graph.node}
        for output in (f"{place}/Add/output_0", f"{place}/MatMul/output_0"):
            if output in there:
                return output
    raise ModelError(
        f"The model builder of onnxruntime-genai writes no layer for {name!r}. Calibrate a basis without it "
        "(target_modules), or merge or export a LoRA for another engine."
    )


def _update(node: Any, x: str, name: str, own: LayerBasis) -> Iterator[Any]:
    """Nodes that add ``P (R (Qᵀ x))`` to a layer's output, which keeps its name."""
    from onnx import helper

    output = node.output[0]
    node.output[0] = f"{name}/base"
    yield helper.make_node("Transpose", [f"{name}/R"], [f"{name}/R/transposed"], perm=[0, 2, 1])
    yield helper.make_node("MatMul", [x, f"{name}/Q"], [f"{name}/Qx"])
    yield helper.make_node("MatMul", [f"{name}/Qx", f"{name}/R/transposed"], [f"{name}/RQx"])
    yield helper.make_node("MatMul", [f"{name}/RQx", f"{name}/P"], [f"{name}/update"])
    yield helper.make_node("Add", [f"{name}/base", f"{name}/update"], [output])
