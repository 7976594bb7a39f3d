"""From text to ids."""
