"""Child processes: starting, watching, restarting, and ending them with their process group."""
