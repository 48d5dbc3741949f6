"""Models, rows and tasks in files, as a user has them: GGUF files, model folders, data sets of the hub, tasks in YAML.

Names and order of rows in a GGUF file are those of llama.cpp, written here by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from frozencore.tune.pocket import pocket_model_path
from frozencore_lab.tasks.registry import find_task

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
GEMMA3_NAMES = {
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(module: str, names: Mapping[str, str] = NAMES) -> str:
    """``model.layers.3.self_attn.q_proj`` is ``blk.3.attn_q``."""
    if module in OUTSIDE:
        return OUTSIDE[module]
    _, _, number, rest = module.split(".", 3)
    return f"blk.{number}.{names[rest]}"


def interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """A head's rows 0, 1, ... h-1 in llama.cpp's order for Llama: 0, h/2, 1, h/2 + 1, ..., found by index."""
    width = len(rows) // num_heads
    of_one = [half * (width // 2) + i for i in range(width // 2) for half in (0, 1)]
    return rows[[head * width + row for head in range(num_heads) for row in of_one]]


def tiny_model(kind: str) -> Any:
    """Two layers, four heads over two of keys and values, the pocket model's vocabulary, float32."""
    shape = {
        "vocab_size": len(pocket_tokenizer()), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval()
    if kind == "gemma3":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, head_dim=8, sliding_window=16)).eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:  # eighths, which 1 + weight of the file holds exactly
                parameter.data = torch.randint(-4, 5, parameter.shape) / 8
        return model
    model = Qwen2ForCausalLM(Qwen2Config(**shape, tie_word_embeddings=True)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def pocket_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(pocket_model_path())


def write_gguf(
    model: Any, file: Path, *, architecture: str | None = None, pre: str = "qwen2", quantised: bool = False
) -> Path:
    """Model and the pocket model's tokenizer, matrices and vectors in float32, or matrices in 8 bits."""
    config, tokenizer = model.config, pocket_tokenizer()
    is_gemma3 = config.model_type == "gemma3_text"
    names = NAMES | GEMMA3_NAMES if is_gemma3 else NAMES
    writer = gguf.GGUFWriter(file, architecture or config.model_type.removesuffix("_text"))
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if is_gemma3:
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    _add_tokenizer(writer, tokenizer, pre)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if tied and module == "lm_head":
            continue
        last = module.rpartition(".")[2]
        rows = interleaved(tensor, heads[last]) if config.model_type == "llama" and last in heads else tensor
        if is_gemma3 and "norm" in module:
            rows = rows + 1  # llama.cpp multiplies by the weight, transformers by 1 + weight
        name, values = f"{gguf_name(module, names)}.{kind}", np.ascontiguousarray(rows.numpy())
        if quantised and values.ndim == 2 and values.shape[1] % 32 == 0:
            of_8_bits = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, of_8_bits), raw_dtype=of_8_bits)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: Any, tokenizer: Any, pre: str) -> None:
    told = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    control = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if number in control else 1 for number in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in told["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_unk_token_id(tokenizer.pad_token_id)  # Gemma's tokenizer must have one
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


VOCABULARY, NUM_SPECIAL = 512, 3


def write_random_llama(folder: Path) -> Path:
    """Four layers of head size 64, which engines know, in float32; it writes no byte and no special token."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, initializer_range=0.1, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    with torch.no_grad():  # never the likeliest: llama-server leaves bytes that are no character out of its answer
        model.lm_head.weight[: NUM_SPECIAL + 256] = 0
    model.save_pretrained(folder)
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(ord("Ā") + i) for i in range(VOCABULARY - len(pieces))]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    ).save_pretrained(folder)
    return folder


TASK = """
name: sums
scoring: exact_match
train: train.jsonl
evaluation: evaluation.jsonl
prompt: "{count} {things} and one more make"
answer: sum
max_new_tokens: 8
"""


def write_rows(file: Path, rows: Iterable[object]) -> Path:
    """Rows as JSONL, a line each."""
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def write_task(folder: Path, *, num_train: int, num_evaluation: int = 3) -> str:
    """The YAML file's path; training rows are of cats, evaluation rows of dogs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, things, count in (("train", "cats", num_train), ("evaluation", "dogs", num_evaluation)):
        rows = ({"count": i, "things": things, "sum": i + 1} for i in range(count))
        write_rows(folder / f"{name}.jsonl", rows)
    (folder / "sums.yaml").write_text(TASK)
    return str(folder / "sums.yaml")


TEXT = Value("string")
PAIR = {"sentence1": TEXT, "sentence2": TEXT, "idx": Value("int32")}
FEATURES = {
    "rte": Features({**PAIR, "label": ClassLabel(names=["entailment", "not_entailment"])}),
    "mrpc": Features({**PAIR, "label": ClassLabel(names=["not_equivalent", "equivalent"])}),
    "openbookqa": Features({
        "id": TEXT, "question_stem": TEXT, "choices": {"text": Sequence(TEXT), "label": Sequence(TEXT)},
        "answerKey": TEXT,
    }),
    "winogrande": Features({"sentence": TEXT, "option1": TEXT, "option2": TEXT, "answer": TEXT}),
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "rte": {
        "sentence1": "No Weapons of Mass Destruction Found in Iraq Yet.",
        "sentence2": "Weapons of Mass Destruction Found in Iraq.", "label": 1, "idx": 0,
    },
    "mrpc": {
        "sentence1": "He said the foodservice pie business doesn 't fit the company 's long-term growth strategy .",
        "sentence2": '" The foodservice pie business does not fit our long-term growth strategy .',
        "label": 1, "idx": 1,
    },
    "openbookqa": {
        "id": "7-980", "question_stem": "The sun is responsible for", "answerKey": "D",
        "choices": {
            "text": ["puppies learning new tricks", "children growing up and getting old", "flowers wilting in a vase",
                     "plants sprouting, blooming and wilting"],
            "label": [*"ABCD"],
        },
    },
    "winogrande": {
        "sentence": "John moved the couch from the garage to the backyard to create space. The _ is small.",
        "option1": "garage", "option2": "backyard", "answer": "1",
    },
    "svamp": {
        "ID": "chal-777", "Type": "Common-Division", "Equation": "( 290.0 / 2.0 )", "Answer": "145",
        "Body": "There are 87 oranges and 290 bananas in Philip's collection, which are organized into 2 groups",
        "Question": "How big is each group of bananas?",
        "question_concat": "There are 87 oranges [...]. How big is each group of bananas?",
    },
    "gsm8k": {
        "question": "Weng earns $12 an hour for babysitting. How much did she earn in 50 minutes?",
        "answer": "She earned 12/60 = $<<12/60=0.2>>0.2 per minute.\n0.2 x 50 = $<<0.2*50=10>>10.\n#### 10",
    },
    "sst2": {"sentence": "it 's a charming and often affecting journey . ", "label": 1, "idx": 0},
    "qnli": {
        "question": "What happens if a plant looses roots or its shoots?",
        "sentence": "In fact it is possible to grow an entire plant from a single leaf [...]", "label": 1, "idx": 3,
    },
    "cola": {"sentence": "The more we study verbs, the crazier they get.", "label": 1, "idx": 3},
    "arc_challenge": {
        "id": "Mercury_7041615", "answerKey": "D",
        "question": "Why did many plants and animals die out at the end of the Mesozoic era?",
        "choices": {"text": ["disease", "new mountains", "rise of mammals", "an asteroid"], "label": [*"ABCD"]},
    },
    "hellaswag": {
        "ind": 12, "activity_label": "Baking cookies", "source_id": "activitynet~v_-2dxp-mv2zo", "split": "train",
        "split_type": "indomain", "label": "3", "ctx_a": "A large tray of cake is flipped over and placed on counter.",
        "ctx_b": "a large tray of meat",
        "ctx": "A large tray of cake is flipped over and placed on counter. a large tray of meat",
        "endings": ["is placed onto a potato.", ", ls, and pickles are placed.", "is poured.", "is prepared."],
    },
}  # fmt: skip
VARIED = {
    "rte": "sentence1", "mrpc": "sentence1", "openbookqa": "question_stem", "winogrande": "sentence", "svamp": "Body",
    "gsm8k": "question", "sst2": "sentence", "qnli": "question", "cola": "sentence", "arc_challenge": "question",
    "hellaswag": "ctx",
}  # fmt: skip


def write_hub_folder(
    root: Path, name: str, num_train: int, num_evaluation: int, num_validation: int = 0, **changes: Any
) -> None:
    """The data set of a task as it lies on the hub: Parquet files and a card that names the configurations."""
    source: Any = find_task(name).source
    folder, config = root / source.path, source.config or "default"
    splits = {"train": num_train, source.splits["evaluation"]: num_evaluation}
    if num_validation and "validation" in source.splits:
        splits[source.splits["validation"]] = num_validation
    (folder / config).mkdir(parents=True, exist_ok=True)
    for split, count in splits.items():
        column = VARIED[name]
        rows = [{**ROWS[name], **changes, column: f"{ROWS[name][column]} {split} {i}"} for i in range(count)]
        Dataset.from_list(rows, features=FEATURES.get(name)).to_parquet(folder / config / f"{split}.parquet")
    card = ["---", "configs:"]
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        card += [f"- config_name: {place.name}", "  data_files:"]
        for file in sorted(place.iterdir()):
            card += [f"  - split: {file.stem}", f"    path: {place.name}/{file.name}"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
