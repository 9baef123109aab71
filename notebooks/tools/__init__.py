"""From a lab's source to its notebooks, and from an executed notebook to pages and pictures."""
