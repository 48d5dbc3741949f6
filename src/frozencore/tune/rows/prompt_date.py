"""A fixed date for chat templates that print today's date.

Such a template (Llama 3.2's, Mistral's) calls transformers' ``strftime_now``. Prompts would then change from day to
day, and with them moments, checkpoints and scores. transformers does not allow replacing the function, so a macro of
the same name is put before the template and prints a fixed date.
"""

from __future__ import annotations

import copy
from datetime import date, datetime, time
from typing import Any

from frozencore.tune.rows.conversations import templates_of

PROMPT_DATE = date(2024, 7, 26)
"""The default date of Llama 3.1's and 3.2's own templates."""
_CLOCK = "strftime_now"
_DIRECTIVES = "aAwdbBmyYHIpMSfjUWcxXGuVeDFhRT"
_UNPADDED = "dmHIMSjy"


def asks_for_today(tokenizer: Any) -> bool:
    """Return whether a chat template of the tokenizer asks for the date."""
    return any(_CLOCK in template for template in templates_of(tokenizer))


def with_fixed_date(tokenizer: Any, today: date) -> Any:
    """The tokenizer, or a copy whose chat templates get this date at midnight as the current time."""
    if not asks_for_today(tokenizer):
        return tokenizer
    dated, templates = copy.copy(tokenizer), tokenizer.chat_template
    if isinstance(templates, dict):
        dated.chat_template = {name: _clock_of(today) + text for name, text in templates.items()}
    else:
        dated.chat_template = _clock_of(today) + templates
    return dated


def _clock_of(today: date) -> str:
    """A macro that replaces strftime's directives; Jinja drops the line break after it."""
    now = datetime.combine(today, time())
    spelled = {f"%{letter}": now.strftime(f"%{letter}") for letter in _DIRECTIVES}
    spelled |= {f"%-{letter}": str(int(spelled[f"%{letter}"])) for letter in _UNPADDED}
    replaced = "".join(f"|replace({directive!r}, {text!r})" for directive, text in spelled.items())
    return f"{{% macro {_CLOCK}(format) %}}{{{{ format{replaced} }}}}{{% endmacro %}}\n"
