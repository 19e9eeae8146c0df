"""Prompt sets of one's own and of others: reword, fetch and list them (`flowalign data`)."""
