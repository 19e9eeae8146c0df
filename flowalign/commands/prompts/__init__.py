"""Official prompt sets: fetch and list them (`flowalign data`)."""
