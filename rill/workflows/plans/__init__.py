"""A recipe and its plan: what may be decided (`recipe`), what it is decided from (`profiling`), and what is decided
again while it runs (`replanning`). The search itself is rill.planning's."""
