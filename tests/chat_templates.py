"""Small chat templates in the manners of real ones. What the assistant writes stands between « and »."""

from __future__ import annotations

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|head|>", "<|body|>", "<|eot|>", "<start_of_turn>", "<end_of_turn>", "<|user|>",
    "<|assistant|>", "<|end|>", "<|start|>", "<|message|>", "<|return|>", "<|call|>", "[INST]", "[/INST]", "<think>",
    "</think>", "<tool>",
)  # fmt: skip
_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool>{{ (c.function or c).name }}{{ (c.function or c).arguments|tojson }}"
    "{% endfor %}"
)
_CALLS_AS_TEXT = "{% for c in m.tool_calls or [] %}{{ '<tool>' + c.function.name + c.function.arguments }}{% endfor %}"
_TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
_ASKS = "{% if add_generation_prompt %}"
_ANSWERS = "{% for m in messages %}{% if m.role == 'assistant' %}"
_SPLIT = (
    "{% set said = m.content or '' %}{% set thought = m.reasoning_content or '' %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set said = said.split('</think>')[-1].strip() %}{% endif %}"
)
_LAST_ASKED = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}"
)


def _turns(answer: str, other: str, asks: str, first: str = "") -> str:
    return f"{first}{_ANSWERS}{answer}{{% else %}}{other}{{% endif %}}{{% endfor %}}{_ASKS}{asks}{{% endif %}}"


_IM = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_IM_ASKS = "<|im_start|>assistant\n"
TEMPLATES = {
    "plain": _turns("<|im_start|>assistant\n«{{ m.content }}" + _CALLS + "<|im_end|>»\n", _IM, _IM_ASKS, _TOOLS),
    "newline in the mark": _turns(
        "<|im_start|>assistant\n«{{ m.content }}" + _CALLS + "<|im_end|>\n»", _IM, _IM_ASKS, _TOOLS
    ),
    "headers": _turns(
        "<|head|>assistant<|body|>\n\n«{{ m.content|trim }}" + _CALLS + "<|eot|>»",
        "<|head|>{{ m.role }}<|body|>\n\n{{ m.content|trim }}<|eot|>",
        "<|head|>assistant<|body|>\n\n",
        "{{ bos_token }}" + _TOOLS,
    ),
    "another end": _turns(
        "<start_of_turn>model\n«{{ m.content }}" + _CALLS + "<end_of_turn>»\n",
        "<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n",
        "<start_of_turn>model\n",
        "{{ bos_token }}" + _TOOLS,
    ),
    "an end after the last": _turns(
        "<|assistant|>\n«{{ m.content }}" + _CALLS + "<|end|>»",
        "<|user|>\n{{ m.content }}<|end|>", "<|assistant|>\n", _TOOLS,
    ) + "{% if not add_generation_prompt %}«{{ eos_token }}»{% endif %}",
    "an end of its own for the last": _turns(
        "<|assistant|>\n«{{ m.content }}" + _CALLS + "{{ eos_token if loop.last else '<|end|>' }}»\n",
        "<|user|>\n{{ m.content }}<|end|>\n", "<|assistant|>\n", _TOOLS,
    ),
    "no end": _turns(
        "<|assistant|>«\n{{ m.content }}" + _CALLS + "»", "<|user|>\n{{ m.content }}", "<|assistant|>", _TOOLS
    ),
    "a space before the answer, tools before the last question": (
        "{{ bos_token }}" + _LAST_ASKED + _ANSWERS + "« {{ m.content }}" + _CALLS + "{{ eos_token }}»{% else %}"
        "{% if loop.index0 == ns.asked %}" + _TOOLS + "{% endif %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    ),
    "opens a thought": _turns(
        "<|assistant|>«{{ m.content.split('</think>')[-1] }}" + _CALLS_AS_TEXT + "{{ eos_token }}»",
        "<|user|>{{ m.content }}", "<|assistant|><think>\n", "{{ bos_token }}" + _TOOLS,
    ),
    "writes the thought that it opens": _turns(
        _SPLIT + "<|im_start|>assistant\n{% if loop.index0 > ns.asked %}<think>\n«{{ thought }}\n</think>\n\n{{ said }}"
        + _CALLS + "<|im_end|>»\n{% else %}«{{ said }}" + _CALLS + "<|im_end|>»\n{% endif %}",
        _IM, "<|im_start|>assistant\n<think>\n", _LAST_ASKED + _TOOLS,
    ),
    "an empty thought for the last": _turns(
        _SPLIT + _IM_ASKS + "«{% if loop.last or thought and loop.index0 > ns.asked %}<think>\n{{ thought }}"
        "\n</think>\n\n{% endif %}{{ said }}" + _CALLS + "<|im_end|>»\n",
        _IM, _IM_ASKS, _LAST_ASKED + _TOOLS,
    ),
    "a thought on one line": _turns(
        _SPLIT + "<|im_start|>assistant\n«<think>{{ thought }}</think>{{ said }}" + _CALLS + "<|im_end|>»\n",
        _IM, "<|im_start|>assistant\n<think>\n", _TOOLS,
    ),
    "asks without a thought": _turns(
        _SPLIT + "<|im_start|>assistant\n{% if loop.last and not thought %}<think>\n\n</think>\n\n{% endif %}"
        "«{% if loop.last and thought %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
        + _CALLS + "<|im_end|>»\n", _IM, "<|im_start|>assistant\n<think>\n\n</think>\n\n", _TOOLS,
    ),
    "channels": _turns(
        "<|start|>assistant«{% if m.reasoning_content and loop.last %}<|message|>{{ m.reasoning_content }}<|end|>"
        "<|start|>assistant{% endif %}<|message|>{{ m.content }}" + _CALLS
        + "{{ '<|return|>' if loop.last else '<|end|>' }}»",
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>", "<|start|>assistant", _TOOLS,
    ),
    "no words for a prompt": _turns(
        "«assistant: {{ m.content }}" + _CALLS + "{{ eos_token }}»\n", "{{ m.role }}: {{ m.content }}\n", "", _TOOLS
    ),
}  # fmt: skip


def plain(template: str) -> str:
    """The template without marks."""
    return template.replace("«", "").replace("»", "")


def marked(template: str) -> str:
    """The template with transformers' marks of what the assistant writes."""
    lines = template.replace("«\n", "«{{ '\n' }}").replace("»\n", "»{{ '\n' }}")  # Jinja drops a line's end after a tag
    return lines.replace("«", "{% generation %}").replace("»", "{% endgeneration %}")
