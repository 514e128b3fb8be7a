"""Child processes: started, watched, restarted, and ended with their process group."""
