"""What the modules of a model are made of, and which of them can be updated."""
