"""Where trials run: the only place in service that imports ray."""
