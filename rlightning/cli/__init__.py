"""The command line: the sections and files of a configuration, `rlightning plan`, `rollout` and `serve`."""
