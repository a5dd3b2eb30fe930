"""Looking at runs: pages made from a run's files, never from live workers."""
