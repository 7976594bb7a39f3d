"""Look at datasets: decoded text, and where it came from."""
