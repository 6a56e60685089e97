"""Reading the tensors of a trainer: modules, state dicts, iterables, callables."""
