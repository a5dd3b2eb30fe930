"""Which worker runs where, when and in what chunks: traced, profiled, searched, simulated, written down, revised.

    graph      who passes what to whom         from the runtime's history, or a file
    profile    what each worker costs          measured points; `fit` turns them into curves
    cost       a problem and its stages        memory, long tails, parallel sizes, kinds of devices
    search     the best plan, exactly          RLinf's Algorithm 1 over frontiers
    plan       the file a run follows
    simulator  the same plan, event by event   8 to 100,000 devices, failures, stragglers
    recipe     what a recipe leaves open, and what a plan writes into it
    profiler   a recipe, measured              one short run on all devices, then on fewer
    replan     is another plan worth a switch? while the run goes on

Nothing here imports torch or knows a cluster.
"""
