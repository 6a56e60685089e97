"""The worker calls by which other frameworks write weights, and what each one means."""
