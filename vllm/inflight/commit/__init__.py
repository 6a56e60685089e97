"""How the two sets change places, and the ledger of updates."""
