"""One technique a file, one function each: ``apply_<technique>(model, mesh, *, ...)`` shards a
plain model in place.
"""
