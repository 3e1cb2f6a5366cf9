"""Every figure and table of the five papers: what it shows, what came out here, and why the two differ."""
