"""Rows as curation reads them: the fields that decide, beside the untouched bytes."""
