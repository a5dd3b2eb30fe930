"""Packages written for verifiers, unmodified: its environment server runs in the user's own Python, and rill speaks the
server's protocol without importing anything of it.

    rill ── run(task, base_url) ──▶ guest.py: verifiers' EnvServer ── chat completions ──▶ agent.base_url ──▶ token tree
         ◀── traces: rewards, metrics, errors ──┘

environment.py   the environment `verifiers`        tasks.py   the data set `verifiers`
server.py        the process and its protocol       guest.py   what that process runs, in the user's Python
"""
