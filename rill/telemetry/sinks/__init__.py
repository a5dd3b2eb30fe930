"""Trackers that a run's figures can go to besides its own files."""
