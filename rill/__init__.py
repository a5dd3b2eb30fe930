"""rill: reinforcement-learning post-training. Write the workflow once; rill decides how it runs."""

__version__ = "0.1.0"
