"""Rows as curation reads them: the facts that decide, beside the untouched bytes."""
