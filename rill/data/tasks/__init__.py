"""Generators of verifiable problems that need no download; one file per task."""
