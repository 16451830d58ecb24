"""The `kvkeep` command, one file a subcommand."""
