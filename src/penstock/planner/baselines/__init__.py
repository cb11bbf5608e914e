"""The planners of others, built from their papers, to be measured against."""
