"""From a recipe to a manifest."""
