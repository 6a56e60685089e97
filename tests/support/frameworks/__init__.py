"""Worker extensions that make the calls of other frameworks' own."""
