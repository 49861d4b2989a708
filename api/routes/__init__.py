"""One module per resource; each only translates between HTTP and the store."""
