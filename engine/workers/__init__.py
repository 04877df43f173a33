"""What lives in a process of the engine, without Ray."""
