"""What lies in a store: its directories, names, locks and segment files, and every call of the system on them."""
