"""The HTTP server: routes, health, metrics and flags."""
