"""The state service: cache events from the log, folded into the durable map, exactly once."""
