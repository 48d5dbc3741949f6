"""The verbs ``campaign``, ``demo`` and ``schema`` of the ``frozencore`` command."""
