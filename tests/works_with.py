"""The table of what works with what in docs/from-lora.md, written from the outcomes of the tests that prove it.

``python tests/works_with.py`` runs them; ``tests/test_from_lora.py`` checks that the page names tests that exist.
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from places import ROOT

PAGE = ROOT / "docs" / "from-lora.md"
BEGIN, END = "<!-- works:begin -->\n", "<!-- works:end -->"

ADAPTER, CALIBRATION = "tests/adapter", "tests/calibration"
CLAIMS: dict[str, str] = {
    "transformers' Trainer": f"{ADAPTER}/test_trainers.py::test_only_the_cores_change_and_the_loss_falls",
    "Trainer: resume, bit-equal on a CPU":
        f"{ADAPTER}/test_trainers.py::test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one",
    "Trainer: best checkpoint at the end":
        f"{ADAPTER}/test_trainers.py::test_the_best_checkpoint_comes_back_at_the_end",
    "TRL SFTTrainer: prompt and completion, chat, loss on the assistant":
        f"{ADAPTER}/test_trl.py::test_only_cores_train_the_loss_falls_and_the_adapter_reloads_equal",
    "TRL SFTTrainer with `peft_config=`":
        f"{ADAPTER}/test_trl.py::test_a_configuration_that_reads_data_says_what_to_call_and_then_trains",
    "TRL SFTTrainer in bf16": f"{ADAPTER}/test_trl.py::test_cores_stay_float32_under_trls_own_bf16",
    "TRL SFTTrainer on a bitsandbytes base, with the lines above":
        f"{ADAPTER}/test_trl.py::test_trl_rounds_the_cores_of_a_quantised_base_and_one_line_takes_it_back",
    "gradient checkpointing, both modes":
        f"{ADAPTER}/test_trainers.py::test_gradient_checkpointing_trains_the_same_cores",
    "`torch.compile(fullgraph=True)`, also after reloading":
        f"{ADAPTER}/test_compile.py::test_a_model_in_training_is_one_graph_with_eagers_logits_and_gradients",
    "`torch.compile`, inductor's numbers": f"{ADAPTER}/test_compile.py::test_inductor_gives_eagers_numbers_to_rounding",
    "`torch.compile` with checkpointing, with the lines above":
        f"{ADAPTER}/test_compile.py::test_gradient_checkpointing_stays_one_graph",
    "calibration on a loader, dataset, list, stream":
        f"{CALIBRATION}/test_examples.py::test_every_form_of_the_same_examples_gives_the_same_bases",
    "bases as a state dict": f"{ADAPTER}/bases/test_access.py::test_bases_of_a_file_make_the_same_adapter",
    "quantised bases: bitsandbytes 8-bit and 4-bit, torchao":
        f"{ADAPTER}/test_quantised.py::test_training_changes_the_cores_only",
    "several processes: bases equal to one process's":
        f"{CALIBRATION}/test_distributed.py::test_the_bases_are_those_of_one_process_on_all_examples",
    "DistributedDataParallel, FSDP2: a step together":
        f"{CALIBRATION}/test_distributed.py::test_a_step_together_is_a_step_on_the_whole_batch",
    "reload in another process, bit-equal":
        f"{ADAPTER}/test_peft.py::test_adapters_reload_bit_equal_in_a_process_of_its_own",
    "merge and unmerge": f"{ADAPTER}/test_layer.py::test_merge_keeps_the_logits_and_unmerge_restores_the_weights",
    "several adapters": f"{ADAPTER}/test_peft.py::test_several_adapters_switch_and_do_not_mix",
    "one batch, several adapters":
        f"{ADAPTER}/test_peft_surface.py::test_each_row_of_a_mixed_batch_is_its_adapters_own",
    "another trained core in place":
        f"{ADAPTER}/test_peft_surface.py::test_a_swapped_core_is_the_saved_adapter_in_the_same_memory",
    "transformers' own `model.load_adapter`":
        f"{ADAPTER}/test_peft_surface.py::test_transformers_own_integration_saves_and_loads_the_adapter",
    "`AutoPeftModelForCausalLM`": f"{ADAPTER}/test_peft_surface.py::test_the_auto_class_finds_base_model_and_adapter",
    "`low_cpu_mem_usage=True` without rounding":
        f"{ADAPTER}/test_peft_surface.py::test_loading_rounds_no_factor_of_a_bf16_model",
    "`modules_to_save`": f"{ADAPTER}/test_peft.py::test_modules_to_save_are_trained_and_saved_with_the_adapter",
    "new tokens": f"{ADAPTER}/test_peft_surface.py::test_new_tokens_train_beside_the_cores_and_are_saved_with_them",
    "GPT-2 (Conv1D)":
        f"{ADAPTER}/bases/test_calibrate.py::test_conv1d_layers_are_calibrated_with_their_transposed_weight",
    "encoder-decoder models":
        f"{CALIBRATION}/test_encoder_decoder.py::test_an_encoder_decoder_adapter_calibrates_trains_and_reloads",
    "exact LoRA export": f"{ADAPTER}/export/test_lora.py::test_stock_peft_gives_the_same_logits",
    "PEFT's `convert_to_lora`": f"{ADAPTER}/test_peft.py::test_an_adapter_converts_to_an_equal_lora",
}  # fmt: skip


def named_on_page() -> dict[str, str]:
    """Test by feature, as the page has them."""
    rows = re.findall(r"^\| (.+) \| \w+ \| `(tests/.+?)` \|$", _split(PAGE.read_text())[1], flags=re.MULTILINE)
    return dict(rows)


def run(claims: Mapping[str, str]) -> dict[str, bool]:
    """Whether each test passed in every case, slow ones included."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "slow or not slow", "--tb=short", f"--junit-xml={report}"]
        subprocess.run([sys.executable, "-m", "pytest", *options, *claims.values()], cwd=ROOT)
        cases = ElementTree.parse(report).getroot().iter("testcase")
    passed: dict[str, list[bool]] = {}
    for case in cases:
        module, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
        passed.setdefault(f"{module.replace('.', '/')}.py::{name}", []).append(len(case) == 0)
    return {feature: all(passed.get(test, [False])) for feature, test in claims.items()}


def render(outcomes: Mapping[str, bool]) -> str:
    lines = [f"| {what} | {'yes' if works else 'NO'} | `{CLAIMS[what]}` |" for what, works in outcomes.items()]
    return "\n".join(["| with | works | proven by |", "|---|---|---|", *lines]) + "\n"


def _split(page: str) -> tuple[str, str, str]:
    before, begin, rest = page.partition(BEGIN)
    table, end, after = rest.partition(END)
    return before + begin, table, end + after


def main() -> int:
    outcomes = run(CLAIMS)
    before, _, after = _split(PAGE.read_text())
    PAGE.write_text(before + render(outcomes) + after)
    return int(not all(outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
