"""Prompt sets of one's own and of others: generate, fetch and check them (`flowalign data`)."""
