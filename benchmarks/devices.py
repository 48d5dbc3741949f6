"""Cores in ONNX Runtime on a CPU, beside the model without them and beside LoRAs (extra ``onnx``).

    python benchmarks/devices.py          # SmolLM2, about ten minutes;  --quick: the pocket model

Five models take turns at one prompt and greedy tokens in onnxruntime-genai, on one thread: the base model as its
builder writes it and with q, k and v as three layers, the model with a basis without a core and with one, and the base
model with a LoRA of the same rank, whose A and B are inputs of the graph as a core is. Only the first joins q, k and v.
Times are processor seconds, divided by the base model's of the same round; ``int4`` models have base weights of 4 bits.
``open_ms``: what ``LoraAdapter.Load`` takes for a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from contestants import ATTENTION
from frozencore import Basis, Core, FrozenCoreConfig, load_basis, save_basis
from frozencore.adapter.export.onnx import build_base, export_onnx
from frozencore.tune.locate import smollm2_path
from frozencore.tune.pocket import pocket_model_path
from harness import parser_of, ratios, table, take_turns, with_range, write_found

BASE, APART, WITHOUT, CORE, LORA = "base model", "base model, q, k, v apart", "with a basis, no core", "core", "LoRA"
PRECISIONS = {"float32": None, "int4": 4}
OPENED = 200


def make_basis(model: Path, folder: Path, rank: int) -> Basis:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = FrozenCoreConfig(r=rank, constructor="random", target_modules=list(ATTENTION))
    save_basis(get_peft_model(base, config), folder)
    return load_basis(folder)


def add_lora(path: Path, basis: Basis) -> dict[str, torch.Tensor]:
    """Put A and B of a LoRA of the basis' ranks into a graph as inputs; return random ones by their names."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from frozencore.adapter.export.onnx_graph import output_of

    model = onnx.load(path, load_external_data=False)
    graph, factors = model.graph, {}
    outputs = {output_of(graph, name): name for name in basis.layers}
    inputs = {node.output[0]: node.input[0] for node in graph.node if node.input}
    nodes = []
    for node in graph.node:
        nodes.append(node)
        output = node.output[0]
        if (name := outputs.get(output)) is not None:
            own = basis.layers[name]
            A, B = torch.randn(len(own.Q), own.rank), 0.01 * torch.randn(own.rank, len(own.P))
            factors |= {f"{name}.A": A, f"{name}.B": B}
            node.output[0] = f"{name}/base"
            nodes += [
                helper.make_node("MatMul", [inputs[output.replace("/Add/", "/MatMul/")], f"{name}.A"], [f"{name}/Ax"]),
                helper.make_node("MatMul", [f"{name}/Ax", f"{name}.B"], [f"{name}/update"]),
                helper.make_node("Add", [f"{name}/base", f"{name}/update"], [output]),
            ]
    for name, X in factors.items():
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, X.shape))
        graph.initializer.append(numpy_helper.from_array(torch.zeros_like(X).numpy(), name))
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, path)
    return factors


def write_lora(factors: Mapping[str, torch.Tensor], path: Path) -> None:
    import onnxruntime

    file = onnxruntime.AdapterFormat()
    file.set_adapter_version(1)
    file.set_model_version(1)
    file.set_parameters({name: onnxruntime.OrtValue.ortvalue_from_numpy(X.numpy()) for name, X in factors.items()})
    file.export_adapter(str(path))


def on_one_thread(folder: Path) -> Any:
    import onnxruntime_genai

    file = folder / "genai_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["model"]["decoder"]["session_options"] |= {"intra_op_num_threads": 1, "inter_op_num_threads": 1}
    file.write_text(json.dumps(settings), encoding="utf-8")
    return onnxruntime_genai.Model(str(folder))


def answer(model: Any, adapters: Any, name: str | None, prompt: list[int], new_tokens: int) -> list[int]:
    import onnxruntime_genai

    options = onnxruntime_genai.GeneratorParams(model)
    options.set_search_options(max_length=len(prompt) + new_tokens, min_length=len(prompt) + new_tokens)
    generator = onnxruntime_genai.Generator(model, options)
    if name is not None:
        generator.set_active_adapter(adapters, name)
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    return list(generator.get_sequence(0).tolist())


def contestants(
    model: Path, folder: Path, basis: Basis, bits: int | None, core: Core, prompt: list[int], new_tokens: int
) -> dict[str, Callable[[], Any]]:
    """The five models of a precision, each ready to answer; their files stay in the folder."""
    import onnxruntime_genai

    from frozencore.adapter.export.onnx_graph import write_onnx_adapter

    precision = "fp32" if bits is None else f"int{bits}"
    for name, fused in (
        (BASE, model.name == "smollm2"),
        (APART, False),
        (LORA, False),
    ):  # the pocket model's heads cannot be fused
        (folder / name).mkdir(parents=True)
        build_base(model, folder / name, precision, folder / "spare", str(model), fused=fused)
    write_lora(add_lora(folder / LORA / "model.onnx", basis), folder / f"{LORA}.onnx_adapter")
    export_onnx(basis.place or "", folder / CORE, base=model, bits=bits)
    write_onnx_adapter(core, folder / f"{CORE}.onnx_adapter")
    models = {name: on_one_thread(folder / name) for name in (BASE, APART, CORE, LORA)}
    without = {BASE: models[BASE], APART: models[APART], WITHOUT: models[CORE]}
    runs = {name: partial(answer, one, None, None, prompt, new_tokens) for name, one in without.items()}
    for name in (CORE, LORA):
        adapters = onnxruntime_genai.Adapters(models[name])
        adapters.load(str(folder / f"{name}.onnx_adapter"), "it")
        runs[name] = partial(answer, models[name], adapters, "it", prompt, new_tokens)
    if runs[BASE]() != runs[WITHOUT]():
        raise SystemExit("Without a core the model with a basis gives other tokens than the base model.")
    return runs


def opening(path: Path) -> dict[str, Any]:
    """Bytes of an adapter's file, and milliseconds by the clock to open it."""
    import onnxruntime

    taken = []
    for _ in range(OPENED):
        begins = perf_counter()
        onnxruntime.LoraAdapter().Load(str(path))
        taken.append(1e3 * (perf_counter() - begins))
    return {"bytes": path.stat().st_size, "open_ms": median(taken)}


def measure(model: Path, rank: int, new_tokens: int, rounds: int, folder: Path) -> dict[str, Any]:
    basis = make_basis(model, folder / "basis", rank)
    size = sum(r * r for r in basis.ranks.values())
    core = Core(basis.id, 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(0)))
    prompt = [3 + 7 * i % 500 for i in range(16)]
    rates, files = [], {}
    for precision, bits in PRECISIONS.items():
        here = folder / precision
        times = take_turns(contestants(model, here, basis, bits, core, prompt, new_tokens), rounds)
        for name, taken in times.items():
            rates.append(
                {"precision": precision, "model": name, "tokens_per_s": new_tokens / median(taken),
                 "of_base": ratios(times[BASE], taken), "processor_s": taken}
            )  # fmt: skip
            print(precision, name, rates[-1]["tokens_per_s"], rates[-1]["of_base"], flush=True)
        files[precision] = {
            name: sum(file.stat().st_size for file in (here / name).glob("model.onnx*")) for name in (BASE, CORE)
        } | {"basis": (here / CORE / "basis.onnx.data").stat().st_size}
    adapters = {name: opening(folder / "float32" / f"{name}.onnx_adapter") for name in (CORE, LORA)}
    return {"rank": rank, "layers": len(basis.ranks), "rates": rates, "adapters": adapters, "model_bytes": files}


def table_of(found: Mapping[str, Any]) -> str:
    """Tokens a second, also as a share of the base model's, and an adapter's bytes and opening."""
    shares = [
        [row["model"], row["precision"], f"{row['tokens_per_s']:.1f}", with_range(row["of_base"], ".0%")]
        for row in found["rates"]
    ]
    opened = [
        [f"{name}, r = {found['rank']}", f"{one['bytes']:,}", f"{one['open_ms']:.2f} ms"]
        for name, one in found["adapters"].items()
    ]
    rates = table(["", "base weights", "tokens a second", "of the base model"], shares)
    return f"{rates}\n{table(['an adapter', 'bytes', 'opened in'], opened)}"


def main() -> None:
    options = parser_of(__doc__, "devices").parse_args()
    torch.manual_seed(0)
    model, rank, new_tokens, rounds = (smollm2_path(), 16, 32, 15)
    if options.quick:
        model, rank, new_tokens, rounds = pocket_model_path(), 4, 3, 2
    with TemporaryDirectory() as folder:
        found = measure(model, rank, new_tokens, rounds, Path(folder))
    print(table_of(found))
    engine = {name: version(name) for name in ("onnxruntime", "onnxruntime-genai", "onnx")}
    write_found(options, model=model.name, new_tokens=new_tokens, **found, engine=engine)


if __name__ == "__main__":
    main()
