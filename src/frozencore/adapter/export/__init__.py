"""Exports: an exact LoRA, merged weights, a basis model with tenants, ONNX, links; and the rules of serving engines."""
