"""Charts as plain numbers, which the templates draw as SVG."""
