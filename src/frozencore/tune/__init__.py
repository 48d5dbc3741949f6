"""``frozencore tune``: rows, tasks, scoring, training, methods and runs. The library never imports it."""
