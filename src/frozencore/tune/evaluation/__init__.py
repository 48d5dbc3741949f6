"""The verb ``evaluate``: any adapters of one base on any tasks, lm-evaluation-harness's among them."""
