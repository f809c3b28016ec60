"""filter_dataset: all filters for rows, and the reasons for which they drop a row."""
