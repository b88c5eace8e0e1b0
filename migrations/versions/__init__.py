"""One file a change of schema, each with its way back."""
