"""Prompt sets, the user's and official ones: reword, fetch and list them (`flowalign data`)."""
