"""From prompts to finished trajectories."""
