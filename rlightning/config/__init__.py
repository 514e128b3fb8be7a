"""A configuration: its files, the names and types of its keys, its secrets, and checks of arguments from Python."""
