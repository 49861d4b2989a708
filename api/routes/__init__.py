"""One file a resource; each only translates between HTTP and the store."""
