"""What holds for the tests of the wire."""

import os

# Torch's store asks the DNS what its peers are called, only to log it; a query that
# is lost then costs a second instead of five. Processes started here inherit it.
os.environ.setdefault("RES_OPTIONS", "timeout:1")
