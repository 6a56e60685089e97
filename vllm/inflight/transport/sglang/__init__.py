"""Tensors as SGLang's clients and checkpoint-engines hand them over."""
