"""Errors of a configuration: found from signatures in a second, shown with their line and a remedy."""
