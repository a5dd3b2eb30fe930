"""Keeps what a library would read from the environment in the moment in which it is loaded."""

import os

SPIN_COUNT_AT_IMPORT = os.environ.get("GOMP_SPINCOUNT", "")
