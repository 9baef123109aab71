"""One technique per file: ``apply_<technique>(model, mesh, ...)`` shards a plain model in place."""
