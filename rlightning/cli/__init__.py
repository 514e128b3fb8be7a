"""The command line: sections, configuration files, `rlightning plan` and `rlightning serve`."""
