"""What runs in a page of the book: explorers without a kernel, without numpy, and without matplotlib.

The book carries a Python for browsers (Pyodide), but neither numpy nor matplotlib. ``stand_ins`` lets the explorers of
labkit_course be imported all the same, unchanged, ``figure`` draws what they ask matplotlib to draw, and ``explorers``
answers the page. All of it runs in any Python, so that the build draws the first figures the same way.
"""
