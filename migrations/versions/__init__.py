"""One file a change of schema, each with its way back. To change rows that have ended: `migrations.ended`."""
