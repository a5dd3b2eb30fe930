"""The command `rill`: one file per command, joined in rill.cli.main."""
