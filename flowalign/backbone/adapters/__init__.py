"""LoRA adapters as folders of files, and where they come from."""
