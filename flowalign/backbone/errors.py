"""What goes wrong with a base model."""


class ModelError(OSError):
    """A base model that cannot be loaded: what was seen, what is possible, what to do."""
