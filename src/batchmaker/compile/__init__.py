"""A module made fast: exported, folded, cut into what needs state and what does not, packed."""
