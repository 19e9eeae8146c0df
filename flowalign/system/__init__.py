"""The base of all other packages: files, signals, devices, HTTP. No model, no config."""
