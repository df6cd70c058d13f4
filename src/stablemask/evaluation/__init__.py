"""Measures of trained models. Each yields pairs of a name and a value."""
