"""Records of all that the patches use of upstream, checked by `make upstream`."""
