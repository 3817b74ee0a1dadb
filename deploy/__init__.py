"""How processes start: the command line, the local supervisor, brokers, the live view."""
