"""filter_dataset: all filters for rows, and their reasons for dropping a row."""
