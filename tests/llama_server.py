"""llama.cpp: its own converters, and ``llama-server`` with every adapter loaded and each request choosing one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_process import Answer, EngineProcess, environment_of

# One process for many conversions: importing what the scripts need takes longer than all of them.
CONVERT = """
import json, os, runpy, sys
jobs, results = json.load(sys.stdin), {}
for name, (script, *words) in jobs.items():
    sys.argv, sys.path[0] = [script, *words], os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
        results[name] = None
    except BaseException as error:
        results[name] = f"{type(error).__name__}: {error}"
print(json.dumps(results))
"""


def convert(models: Mapping[Path, Path], loras: Mapping[Path, tuple[Path, Path]]) -> dict[Path, str | None]:
    """Run llama.cpp's converters in float32.

    Args:
        models: Model folders by the files to write.
        loras: LoRA directories and their base folders by the files to write.

    Returns:
        For every file, what the converter ended with; None where it was written.
    """
    home = environment_of("llama.cpp")
    said = ["--outtype", "f32", "--outfile"]
    jobs = {
        str(out): [str(home / "src" / "convert_hf_to_gguf.py"), str(folder), *said, str(out)]
        for out, folder in models.items()
    }
    for out, (folder, base) in loras.items():
        script = home / "src" / "convert_lora_to_gguf.py"
        jobs[str(out)] = [str(script), str(folder), "--base", str(base), *said, str(out)]
    command = [home / "bin" / "python", "-c", CONVERT]
    done = subprocess.run(command, input=json.dumps(jobs), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {Path(out): reason for out, reason in json.loads(done.stdout.splitlines()[-1]).items()}


class LlamaServer(EngineProcess):
    """``llama-server`` of a gguf file and its adapters, all applied until a request or ``apply`` says others."""

    def __init__(self, model: Path, log: Path, loras: Sequence[Path] = (), *flags: str) -> None:
        program = environment_of("llama.cpp") / "bin" / "llama-server"
        command: list[str | Path] = [program, "--model", model, "--threads", "1", "--parallel", "1"]
        command += ["--ctx-size", "256", "--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32"]
        for lora in loras:
            command += ["--lora", lora]
        super().__init__([*command, *flags], log, {})
        self.loras = list(loras)

    def ask(self, prompt: list[int], num_tokens: int, lora: Path | None = None, *, scale: float = 1.0) -> Answer:
        """Continue a prompt greedily with one of the adapters, or as the server's scales are, to the end of the text
        (which ``ignore_eos`` would forbid)."""
        chosen = {} if lora is None else {"lora": [{"id": self.loras.index(lora), "scale": scale}]}
        found: list[dict[str, Any]] = self.post(
            "/completion",
            {"prompt": prompt, "n_predict": num_tokens, "temperature": -1, "n_probs": 1, "cache_prompt": False}
            | chosen,
        )["completion_probabilities"]  # fmt: skip
        return Answer([token["id"] for token in found], [token["logprob"] for token in found])

    def apply(self, *loras: Path) -> None:
        """Which adapters requests get that ask for none."""
        scales = [{"id": i, "scale": float(lora in loras)} for i, lora in enumerate(self.loras)]
        self.post("/lora-adapters", scales)
