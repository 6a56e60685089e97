"""Groups that a trainer opens with torch.distributed alone."""
