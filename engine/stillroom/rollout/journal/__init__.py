"""The append-only journal from which a killed run resumes, and the shards of a split run."""
