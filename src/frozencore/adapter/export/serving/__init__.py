"""Which serving engines take a LoRA directory: tests/engines asks vLLM and llama.cpp, SGLang's rules are read."""

from frozencore.adapter.export.serving.check import LoraReport, Problem, check_lora_directory
from frozencore.adapter.export.serving.rules import ENGINES, RULES, Rule

__all__ = ["ENGINES", "RULES", "LoraReport", "Problem", "Rule", "check_lora_directory"]
