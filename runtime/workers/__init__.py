"""Worker processes, and the frames that they exchange."""
