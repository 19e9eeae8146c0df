"""Model cards, and what goes to the Hub."""
