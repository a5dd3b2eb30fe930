"""What of a run survives its processes: checkpoints of all its groups together."""
