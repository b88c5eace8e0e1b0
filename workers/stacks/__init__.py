"""Whose code synchronises: the reference stack under the catalogue's orderings, or somebody else's."""
