"""The audit of a release of vLLM: does this package fit its Python files?"""
