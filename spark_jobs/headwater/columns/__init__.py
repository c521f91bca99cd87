"""Which columns a table has at the source, in the lake, and from which moment on."""
