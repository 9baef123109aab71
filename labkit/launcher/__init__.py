"""Outside the ranks: start them, watch them, stop them, say what went wrong."""
