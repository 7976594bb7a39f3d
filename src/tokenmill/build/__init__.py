"""Building a dataset: from a recipe to a manifest."""
