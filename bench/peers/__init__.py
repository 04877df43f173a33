"""Paceline compared with other servers."""
