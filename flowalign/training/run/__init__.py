"""What keeps a run alive: checkpoints, resume, the lock, its processes."""
