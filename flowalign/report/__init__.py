"""What a run shows: its log, samples, pictures, and how far its images drift."""
