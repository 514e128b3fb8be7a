"""The memory of a run, planned from configurations alone."""
