"""Rules of the service: pure, no I/O."""
