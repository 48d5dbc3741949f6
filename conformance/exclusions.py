from __future__ import annotations
def reason_to_exclude(file, test, params): return None
