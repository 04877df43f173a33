"""Routes, connections, keys and admission."""
