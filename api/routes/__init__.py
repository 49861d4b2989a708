"""One module per subject; each only translates between HTTP and the store."""
