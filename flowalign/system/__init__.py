"""The ground that all rooms stand on: files, signals, devices, HTTP. No model, no config."""
