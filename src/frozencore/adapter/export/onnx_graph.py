"""The graph of an ONNX model with a basis in it, and the file of a core (:mod:`frozencore.adapter.export.onnx`).

This module needs the packages of the extra ``onnx``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from frozencore.adapter.basis import Basis
from frozencore.adapter.core import CORE, Core
from frozencore.adapter.export.lora import in_dtype
from frozencore.errors import ArtifactError, ModelError
from frozencore.maths.basis import LayerBasis

WEB_FILE, BASIS_FILE = "model-web.onnx", "basis.onnx.data"
ENTRY = "frozencore_basis_id"
_LAYER = re.compile(r".*\blayers\.(\d+)\.(self_attn|mlp)\.(\w+)")
_IN_GRAPH = {"dense": "o_proj", "out_proj": "o_proj"}


def write_onnx_adapter(core: Core, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a core as the one tensor of an ``.onnx_adapter`` file."""
    name = f"{CORE}{core.basis_id}"
    values = in_dtype(name, core.values.cpu(), dtype)
    file = onnxruntime.AdapterFormat()
    file.set_adapter_version(1)
    file.set_model_version(1)
    file.set_parameters({name: onnxruntime.OrtValue.ortvalue_from_numpy(values[None].numpy())})
    file.export_adapter(str(path))


def input_of_cores(path: Path) -> tuple[str, torch.dtype]:
    """The id of the basis in a model's file that :func:`frozencore.export_onnx` wrote, and the dtype of cores."""
    entries: dict[str, str] = {}
    if path.is_file():
        model = onnx.load(path, load_external_data=False)
        entries = {entry.key: entry.value for entry in model.metadata_props}
    if ENTRY not in entries:
        raise ArtifactError(
            f"{path.parent} has no {path.name} with a basis in it. Write one with frozencore export --to onnx."
        )
    kinds = {one.name: one.type.tensor_type.elem_type for one in model.graph.input}
    is_half = kinds[f"{CORE}{entries[ENTRY]}"] == TensorProto.FLOAT16
    return entries[ENTRY], torch.float16 if is_half else torch.float32


def add_basis(path: Path, basis: Basis, dtype: torch.dtype) -> None:
    """Put P, Q and the input of cores into a graph, and write its file again, and the one for the web."""
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
    for name, layer in basis.layers.items():
        for side, X in (("Q", layer.Q), ("P", layer.scale * layer.P.double().mT)):
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
    match = _LAYER.fullmatch(name)
    if match is not None:
        index, block, last = match.groups()
        place = f"/model/layers.{index}/{'mlp' if block == 'mlp' else 'attn'}/{_IN_GRAPH.get(last, last)}"
        there = {node.output[0] for node in graph.node}
        for output in (f"{place}/Add/output_0", f"{place}/MatMul/output_0"):
            if output in there:
                return output
    raise ModelError(
        f"The model builder of onnxruntime-genai writes no layer for {name!r}. Calibrate a basis without it "
        "(target_modules), or merge or export a LoRA for another engine."
    )


def _update(node: Any, x: str, name: str, layer: LayerBasis) -> Iterator[Any]:
    """Nodes that add ``P (R (Qᵀ x))`` to a layer's output, which keeps its name."""
    output = node.output[0]
    node.output[0] = f"{name}/base"
    yield helper.make_node("Transpose", [f"{name}/R"], [f"{name}/R/transposed"], perm=[0, 2, 1])
    yield helper.make_node("MatMul", [x, f"{name}/Q"], [f"{name}/Qx"])
    yield helper.make_node("MatMul", [f"{name}/Qx", f"{name}/R/transposed"], [f"{name}/RQx"])
    yield helper.make_node("MatMul", [f"{name}/RQx", f"{name}/P"], [f"{name}/update"])
    yield helper.make_node("Add", [f"{name}/base", f"{name}/update"], [output])
