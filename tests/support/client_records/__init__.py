"""Clients of other frameworks: what they asked of a server, to be asked again."""
