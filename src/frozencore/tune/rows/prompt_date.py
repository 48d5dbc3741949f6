"""One day for chat templates that print today's date.

Such a template (Llama 3.2's, Mistral's) calls ``strftime_now``, which transformers gives it. Prompts would then differ
from day to day, and with them moments, checkpoints and scores. transformers takes no function of ours, so a macro of
that name stands in front of the template and spells a fixed day.
"""

from __future__ import annotations

import copy
from datetime import date, datetime, time
from typing import Any

PROMPT_DATE = date(2024, 7, 26)
"""The day that Llama 3.1's and 3.2's own templates fall back to."""
_CLOCK = "strftime_now"
_DIRECTIVES = "aAwdbBmyYHIpMSfjUWcxXGuVeDFhRT"
_UNPADDED = "dmHIMSjy"


def asks_for_today(tokenizer: Any) -> bool:
    """Whether a chat template of the tokenizer calls the clock."""
    templates = tokenizer.chat_template or ""
    return any(_CLOCK in text for text in (templates.values() if isinstance(templates, dict) else [templates]))


def with_fixed_date(tokenizer: Any, today: date) -> Any:
    """The tokenizer, or a copy whose chat templates are told this day at midnight where they ask for the time."""
    if not asks_for_today(tokenizer):
        return tokenizer
    dated, templates = copy.copy(tokenizer), tokenizer.chat_template
    if isinstance(templates, dict):
        dated.chat_template = {name: _clock_of(today) + text for name, text in templates.items()}
    else:
        dated.chat_template = _clock_of(today) + templates
    return dated


def _clock_of(today: date) -> str:
    """A macro that replaces each of strftime's directives; Jinja drops the line break at its end with the tag."""
    now = datetime.combine(today, time())
    spelled = {f"%{letter}": now.strftime(f"%{letter}") for letter in _DIRECTIVES}
    spelled |= {f"%-{letter}": str(int(spelled[f"%{letter}"])) for letter in _UNPADDED}
    replaced = "".join(f"|replace({directive!r}, {text!r})" for directive, text in spelled.items())
    return f"{{% macro {_CLOCK}(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n"
