"""The verb ``evaluate``: adapters of one base model on any tasks, including lm-evaluation-harness's."""
