"""How long ``compress`` takes, and how much memory, for hundreds of LoRAs at the shapes of Qwen2.5-3B.

    OMP_NUM_THREADS=1 python benchmarks/compress_many.py      # 500 LoRAs of rank 16, to 32; --quick: three

The LoRAs are made up, on q, k, v and o of 36 blocks, their factors normal numbers in bfloat16, 7.4 GB of disk. Seconds
are processor seconds of one thread; the peak is what the process holds above what it held before.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from safetensors.torch import save_file

from frozencore.adapter.compress import compress_adapters
from frozencore.tune.cost import process_peak_bytes
from harness import cpu_s, parser_of, table, write_found

WIDTH, KEYS, BLOCKS = 2048, 256, 36
OUT_OF = {"q_proj": WIDTH, "k_proj": KEYS, "v_proj": KEYS, "o_proj": WIDTH}
RANK, TO_RANK = 16, 32


def write_lora(folder: Path, blocks: int, seed: int) -> None:
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for block in range(blocks):
        for name, width in OUT_OF.items():
            layer = f"base_model.model.model.layers.{block}.self_attn.{name}"
            for side, shape in (("A", (RANK, WIDTH)), ("B", (width, RANK))):
                factor = torch.randn(shape, generator=generator) / 100
                tensors[f"{layer}.lora_{side}.weight"] = factor.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*OUT_OF], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM"}))


def main() -> None:
    parser = parser_of(__doc__, "compress-many")
    parser.add_argument("--adapters", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    number, blocks = (3, 1) if options.quick else (options.adapters, BLOCKS)
    with TemporaryDirectory() as aside:
        folder = Path(aside)
        adapters = {f"lora-{seed:03}": folder / f"lora-{seed:03}" for seed in range(number)}
        for seed, place in enumerate(adapters.values()):
            write_lora(place, blocks, seed)
        held, started = process_peak_bytes(), perf_counter()
        seconds = cpu_s(lambda: compress_adapters(adapters, folder / "out", rank=TO_RANK))
        wall, peak = perf_counter() - started, process_peak_bytes() - held
    sizes = [f"{number}", f"{RANK}", f"{TO_RANK}", f"{blocks * len(OUT_OF)}"]
    heads = ["LoRAs", "rank", "to rank", "layers", "processor seconds", "peak above the process, MB"]
    print(table(heads, [[*sizes, f"{seconds:.0f}", f"{peak / 1e6:.0f}"]]))
    write_found(
        options, adapters=number, rank=RANK, to_rank=TO_RANK, layers=blocks * len(OUT_OF), cpu_s=seconds, wall_s=wall,
        peak_bytes=peak,
    )  # fmt: skip


if __name__ == "__main__":
    main()
