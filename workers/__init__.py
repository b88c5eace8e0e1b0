"""What runs inside a rank. Never imports `service`; importing this package imports neither torch nor ray."""
