"""Rewards that another process scores: the server, the client, and the format between them."""
