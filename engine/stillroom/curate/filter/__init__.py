"""filter_dataset: every filter, and the reasons for which rows are dropped."""
