"""What ``frozencore tune`` does: rows, tasks, scoring, training, methods, one run. The library never imports it."""
