"""What a run leaves behind and how it is read: metrics, spans, the run folder, guards, sinks.

Every process writes plain JSON lines into the run folder; every reader works on those files, while the run goes
on and after it. Import from the modules: `trace`, `metrics`, `run`, `guards`.
"""
