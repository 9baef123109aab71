"""Plain single-device modules, which know no rank; parallelism is applied from outside."""
