"""Build the book: gather its pages from docs/, the solved labs, the code and recorded results, then run Sphinx."""
