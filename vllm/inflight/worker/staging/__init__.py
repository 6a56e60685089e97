"""How an update is received and loaded into the shadow model."""
